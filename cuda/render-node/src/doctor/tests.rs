use super::*;

/// A guest with a few files.
struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a folder"))
    }

    fn with(self, path: &str, text: &str) -> Self {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        fs::write(path, text).expect("written");
        self
    }

    /// Adds a virtio-gpu device. `window` is the line of its window in the device's `resource` file.
    fn device(self, window: &str) -> Self {
        let device = "sys/bus/pci/devices/0000:00:05.0";
        self.with(&format!("{device}/vendor"), "0x1af4\n")
            .with(&format!("{device}/device"), "0x1050\n")
            .with(&format!("{device}/resource"), &format!("0xfeb00000 0xfeb0ffff 0x200\n{window}\n"))
    }

    fn whole(self) -> Self {
        self.device("0x4000000000 0x40ffffffff 0x14220c")
            .with("proc/sys/kernel/osrelease", "6.12.9-amd64\n")
            .with("sys/module/virtio_gpu/initstate", "live")
            .with("dev/dri/renderD128", "")
    }

    fn findings(&self) -> Vec<Finding> {
        Guest { root: self.0.path().to_owned() }.facts()
    }

    /// Returns the check and the remedy of the last finding, which must be the only one with a remedy.
    fn missing(&self) -> (&'static str, String) {
        let mut findings = self.findings();
        let last = findings.pop().expect("findings");
        assert!(findings.iter().all(|finding| finding.remedy.is_none()), "{findings:?}");
        (last.check, last.remedy.expect("a remedy"))
    }
}

#[test]
fn whole_guest_has_no_remedies() {
    let found = Files::new().whole().findings();
    assert!(found.iter().all(|finding| finding.remedy.is_none()), "{found:?}");
    let checks: Vec<_> = found.iter().map(|finding| finding.check).collect();
    assert_eq!(checks, ["device", "window", "kernel", "render-node"]);
}

#[test]
fn guest_without_device_is_told_the_hosts_command() {
    let (check, remedy) = Files::new().with("sys/bus/pci/devices/0000:00:01.0/vendor", "0x8086").missing();
    assert_eq!(check, "device");
    assert!(remedy.contains("--cuda") && remedy.contains("launch-args"), "{remedy}");
}

#[test]
fn window_without_room_or_below_4_gib_is_named() {
    for window in ["0x0 0x0 0x0", "0xe0000000 0xefffffff 0x200", ""] {
        let (check, remedy) = Files::new().device(window).missing();
        assert_eq!(check, "window");
        assert!(remedy.contains("pci-hole64-size"), "{remedy}");
    }
    let (check, remedy) = Files::new().device("0x40000000 0x7fffffff 0x200").missing();
    assert_eq!(check, "window");
    assert!(remedy.contains("above 4 GiB"), "{remedy}");
}

#[test]
fn kernel_without_drm_and_module_that_is_not_loaded_differ() {
    let guest =
        || Files::new().device("0x4000000000 0x40ffffffff 0x14220c").with("proc/sys/kernel/osrelease", "6.1-cloud");
    let (check, remedy) = guest().missing();
    assert_eq!(check, "kernel");
    assert!(remedy.contains("linux-image-amd64"), "{remedy}");
    let modules = "kernel/drivers/gpu/drm/virtio/virtio-gpu.ko.xz: kernel/x.ko\n";
    let (check, remedy) = guest().with("lib/modules/6.1-cloud/modules.dep", modules).missing();
    assert_eq!(check, "kernel");
    assert!(remedy.contains("modprobe virtio-gpu"), "{remedy}");
}

#[test]
fn missing_render_node_is_named() {
    let guest = Files::new()
        .device("0x4000000000 0x40ffffffff 0x14220c")
        .with("sys/module/virtio_gpu/initstate", "live")
        .with("dev/dri/card0", "");
    let (check, remedy) = guest.missing();
    assert_eq!(check, "render-node");
    assert!(remedy.contains("dmesg"), "{remedy}");
}

#[test]
fn errors_of_the_node_have_remedies() {
    let denied = node(Err(OpenError::Denied("/dev/dri/renderD128".into())));
    assert_eq!((denied.check, denied.remedy.is_some_and(|remedy| remedy.contains("usermod"))), ("access", true));
    let newer = node(Err(OpenError::Version { host: 9 }));
    assert!(newer.found.contains("update the package gpu-mediator-guest"), "{}", newer.found);
    assert!(node(Err(OpenError::None)).remedy.is_some_and(|remedy| remedy.contains("mediatorctl doctor")));
}

#[test]
fn library_of_another_package_is_named() {
    let list = |places: &[&str]| {
        let lines = places.iter().map(|place| format!("\tlibcuda.so.1 (libc6,x86-64) => {place}\n"));
        library(
            format!("9 libs found\n\tlibc.so.6 (libc6) => /lib/libc.so.6\n{}", lines.collect::<String>()).as_bytes(),
        )
    };
    let ours = "/usr/lib/gpu-mediator-guest/libcuda.so.1";
    assert_eq!(list(&[ours, "/usr/lib/x86_64-linux-gnu/libcuda.so.1"]).remedy, None);
    let other = list(&["/usr/lib/x86_64-linux-gnu/libcuda.so.1", ours]).remedy.expect("a remedy");
    assert!(other.contains("apt remove libcuda1"), "{other}");
    assert!(list(&[]).remedy.is_some_and(|remedy| remedy.contains("ldconfig")));
}
