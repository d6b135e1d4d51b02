use std::os::unix::fs::MetadataExt;

use mediatord::fixture::{Served, one_card};
use tempfile::TempDir;

use super::*;
use crate::Code;

/// A daemon, and the folders of a host with libvirt.
struct Site {
    served: Served,
    folder: TempDir,
}

impl Site {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("boot"), "first\n").unwrap();
        // Without root, these tests can change a file's owner only to their own user.
        let uid = fs::metadata(folder.path()).unwrap().uid();
        fs::write(folder.path().join("passwd"), format!("root:x:0:0:\nlibvirt-qemu:x:{uid}:1:\n")).unwrap();
        let profile = "[[profile]]\nname = \"sliver\"\nvram_mib = 16\nweight = 300\n";
        let served = one_card(profile);
        let sockets = served.fixture.path("").display().to_string();
        fs::write(folder.path().join("config"), format!("[daemon]\nsocket_dir = {sockets:?}\n")).unwrap();
        Self { served, folder }
    }

    fn client(&self) -> Client {
        Client::new(self.served.fixture.path("admin.sock")).unwrap()
    }

    fn hook(&self, domain: &str, operation: &str, when: &str, text: &str) -> Result<String, ClientError> {
        let at = |name: &str| self.folder.path().join(name);
        let hook = Hook {
            domain: domain.to_owned(),
            operation: operation.to_owned(),
            when: when.to_owned(),
            more: vec!["-".to_owned()],
            passwd: at("passwd"),
            notes: at("notes"),
            boot: at("boot"),
            config: at("config"),
        };
        hook.run(&self.client(), text.as_bytes())
    }

    /// Adds a VM as an operator would.
    fn add(&self, name: &str) {
        let socket = self.served.fixture.path("admin.sock");
        let words = ["mediatorctl", "--socket", socket.to_str().unwrap(), "vm", "add", name, "--profile", "sliver"];
        assert_eq!(crate::run(words, &mut Vec::new(), &mut Vec::new()), Code::Good);
    }

    fn vms(&self) -> Vec<String> {
        self.client().get::<api::VmList>("/v1/vms").unwrap().vms.into_iter().map(|vm| vm.name).collect()
    }

    /// Returns the XML of a domain with a `vgpu` element and a device that uses the virtual machine's socket.
    fn domain(&self, vgpu: &str, vm: &str) -> String {
        let socket = self.served.fixture.path(&format!("{vm}.sock")).display().to_string();
        format!(
            "<?xml version='1.0'?><domain xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'><metadata><g:vgpu \
             xmlns:g='{NAMESPACE}' {vgpu}/></metadata><qemu:commandline><qemu:arg value='-device'/><qemu:arg \
             value='{{&quot;socket&quot;:{{&quot;path&quot;:&quot;{socket}&quot;}}}}'/></qemu:commandline></domain>"
        )
    }
}

#[test]
fn a_vgpu_comes_and_goes_with_its_domain() {
    let site = Site::new();
    let domain = site.domain("profile='sliver'", "web");
    site.hook("web", "prepare", "begin", &domain).unwrap();
    let vm: api::Vm = site.client().get("/v1/vms/web").unwrap();
    assert_eq!((vm.vram_mib, vm.profile.as_deref(), &*vm.card), (16, Some("sliver"), "card0"));
    assert_eq!(fs::metadata(vm.socket.unwrap()).unwrap().mode() & 0o777, 0o600);
    for (operation, when) in
        [("start", "begin"), ("started", "begin"), ("stopped", "end"), ("reconnect", "begin"), ("prepare", "end")]
    {
        site.hook("web", operation, when, &domain).unwrap();
        assert_eq!(site.vms(), ["web"], "{operation} {when}");
    }
    // The hook's VM is removed, regardless of the current XML.
    site.hook("web", "release", "end", &site.domain("vm='other' profile='sliver'", "other")).unwrap();
    assert_eq!(site.vms(), Vec::<String>::new());
    site.hook("web", "release", "end", &domain).unwrap();
}

#[test]
fn a_domain_without_the_element_is_left_alone() {
    let site = Site::new();
    site.add("web");
    for text in ["<domain/>", "<domain><metadata><x:vgpu xmlns:x='urn:other' vram-mib='16'/></metadata></domain>"] {
        site.hook("web", "prepare", "begin", text).unwrap();
        site.hook("web", "release", "end", text).unwrap();
        assert_eq!(site.vms(), ["web"]);
    }
    // An operator's VM with this name is kept.
    let error = site.hook("web", "prepare", "begin", &site.domain("profile='sliver'", "web")).unwrap_err();
    assert!(error.to_string().contains("the existing VM `web` was not created by this hook"), "{error}");
    assert_eq!(site.vms(), ["web"]);
}

#[test]
fn leftovers_of_power_loss_are_removed_at_next_start() {
    let site = Site::new();
    let domain = |name: &str| site.domain("vram-mib='16'", name);
    for name in ["again", "lost", "too"] {
        site.hook(name, "prepare", "begin", &domain(name)).unwrap();
    }
    // A start removes no VMs that were created in the same boot.
    assert_eq!(site.vms(), ["again", "lost", "too"]);
    fs::write(site.folder.path().join("boot"), "second\n").unwrap();
    // The same domain starts again. Its own leftover VM is replaced, and the others are removed.
    site.hook("again", "prepare", "begin", &domain("again")).unwrap();
    assert_eq!(site.vms(), ["again"]);
}

#[test]
fn domain_with_invalid_vgpu_fails_to_start_without_leftovers() {
    let site = Site::new();
    let cases = [
        (site.domain("profile='none'", "a"), "there is no profile `none`"),
        (site.domain("vram-mib='4096'", "a"), "no card has enough free capacity"),
        (site.domain("vram-mib='many'", "a"), "vram-mib: `many`, expected a number"),
        (site.domain("colour='red'", "a"), "the element `vgpu` has no `colour`"),
        (site.domain("vram-mib='16' user='nobody-here'", "a"), "a.sock"),
        (site.domain("vram-mib='16'", "b"), "none of its devices uses the socket"),
        (site.domain("vram-mib='16' vm='a b'", "a"), "is not a name"),
        ("<domain".to_owned(), "its description is not valid XML"),
        (
            site.domain("vram-mib='16'", "a")
                .replace("</metadata>", &format!("<vgpu xmlns='{NAMESPACE}'/></metadata>")),
            "several elements",
        ),
    ];
    for (text, told) in cases {
        let error = site.hook("a", "prepare", "begin", &text).unwrap_err();
        assert!(error.to_string().contains(told), "{text}: {error}");
        assert_eq!(site.vms(), Vec::<String>::new(), "{text}");
    }
    // A domain's name may contain characters that are not permitted in the file name of its note.
    let name = "../../etc a";
    site.hook(name, "prepare", "begin", &site.domain("vram-mib='16' vm='odd'", "odd")).unwrap();
    assert_eq!(
        (site.vms(), fs::read_dir(site.folder.path().join("notes")).unwrap().count()),
        (vec!["odd".to_owned()], 1)
    );
    site.hook(name, "release", "end", "<domain/>").unwrap();
    assert_eq!(site.vms(), Vec::<String>::new());
}

/// Returns the XML with a UUID, in libvirt's format.
fn with_uuid(text: &str, uuid: &str) -> String {
    text.replace("<metadata>", &format!("<uuid>{uuid}</uuid><metadata>"))
}

#[test]
fn a_release_after_a_refused_preparation_leaves_the_running_vm() {
    let site = Site::new();
    let domain = |uuid: &str| with_uuid(&site.domain("vram-mib='16'", "web"), uuid);
    site.hook("web", "prepare", "begin", &domain("1")).unwrap();
    let mut vmm = site.served.fixture.connect("web");
    // The response proves that the daemon has accepted the connection.
    vmm.read32(mediatord::fixture::BAR0, 0).unwrap();
    let vm: api::Vm = site.client().get("/v1/vms/web").unwrap();
    assert_eq!(vm.state, api::VmState::Connected);
    // While a VMM uses the VM, `prepare` fails for another domain, for a different domain with the same name, and for
    // the domain itself. The `release` that follows must keep the VM.
    let other = site.domain("vm='web' vram-mib='16'", "web");
    for (name, text) in [("other", &other), ("web", &domain("2")), ("web", &domain("1"))] {
        let error = site.hook(name, "prepare", "begin", text).unwrap_err();
        assert!(error.to_string().contains("a VMM uses the VM `web`"), "{error}");
        let released = site.hook(name, "release", "end", text);
        assert_eq!(site.vms(), ["web"], "{name}: {released:?}");
    }
    // The domain itself stops.
    drop(vmm);
    site.hook("web", "release", "end", &domain("1")).unwrap();
    assert_eq!(site.vms(), Vec::<String>::new());
}

#[test]
fn a_release_without_a_preparation_removes_nothing() {
    let site = Site::new();
    let domain = site.domain("profile='sliver'", "web");
    site.add("web");
    site.hook("web", "release", "end", &domain).unwrap();
    assert_eq!(site.vms(), ["web"]);
    // The operator removes and recreates the VM while the domain exists, so the new VM is not the hook's.
    site.client().delete("/v1/vms/web").unwrap();
    site.hook("web", "prepare", "begin", &domain).unwrap();
    site.client().delete("/v1/vms/web").unwrap();
    site.add("web");
    site.hook("web", "release", "end", &domain).unwrap();
    assert_eq!(site.vms(), ["web"]);
}

#[test]
fn a_socket_outside_of_the_configured_folder_is_not_given_away() {
    let site = Site::new();
    fs::write(site.folder.path().join("config"), "[daemon]\nsocket_dir = \"/run/elsewhere\"\n").unwrap();
    let error = site.hook("web", "prepare", "begin", &site.domain("vram-mib='16'", "web")).unwrap_err();
    assert!(format!("{error:?}").contains("it is not in the folder /run/elsewhere"), "{error:?}");
    assert_eq!(site.vms(), Vec::<String>::new());
}
