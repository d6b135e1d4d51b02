//! The hook of libvirt: makes the vGPU of a domain before it starts, and removes it when it has ended, however that was.
//!
//! libvirt runs it as root with the domain's description on standard input: `HOOK DOMAIN prepare begin -` before QEMU starts, and
//! `HOOK DOMAIN release end -` after QEMU has gone, also after it was killed, also when libvirt learns of that only at its next
//! start. A hook that fails before the start keeps the domain from starting, and what it says is shown.
//!
//! All that the hook has made is written down beside libvirt's own state, with the boot of the host, so that what a host left that
//! lost power is removed when the next domain starts.
//!
//! Sources: `hooks.html` of libvirt.

use std::fs;
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, PermissionsExt, lchown};
use std::path::{Path, PathBuf};

use admin_client::AskError;
use clap::Args;
use quick_xml::events::{BytesStart, Event};
use quick_xml::{Reader, XmlVersion};
use serde_json::{Map, Value};

use api::ErrorCode;
use api::launch::{self, MemorySize, NAMESPACE, Named, SocketVmm};
use config::check::name_is_good;

use super::client::{self, Client, ClientError};

/// Largest description of a domain, in bytes.
const MAX_DOMAIN: u64 = 4 << 20;
/// Users that libvirt runs QEMU as: Debian's, and others'.
const USERS: [&str; 2] = ["libvirt-qemu", "qemu"];

#[derive(Clone, Debug, Args)]
pub(super) struct Hook {
    /// Name of the domain
    domain: String,
    /// Event: prepare, start, started, stopped, release, reconnect and others
    operation: String,
    /// begin or end
    when: String,
    /// Libvirt's further words
    more: Vec<String>,
    /// Users and groups, for tests
    #[arg(long, value_name = "PATH", default_value = "/etc/passwd", hide = true)]
    passwd: PathBuf,
    /// Folder in which is written down what the hook has made
    #[arg(long, value_name = "PATH", default_value = "/var/lib/libvirt/gpu-mediator", hide = true)]
    notes: PathBuf,
    /// The number of the host's boot
    #[arg(long, value_name = "PATH", default_value = "/proc/sys/kernel/random/boot_id", hide = true)]
    boot: PathBuf,
}

/// A domain's word on its vGPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Wanted {
    vm: String,
    keys: Map<String, Value>,
    /// User that is to have the socket.
    user: Option<String>,
    /// All that is passed to QEMU as it is.
    passed: Vec<String>,
}

fn wrong(error: String, what_to_do: &str) -> ClientError {
    AskError::Refused(api::Error { code: ErrorCode::Invalid, error, what_to_do: what_to_do.to_owned() }).into()
}

/// The domain whose vGPU the hook makes from a profile.
///
/// # Errors
/// The daemon has no such profile, or the name cannot be that of a virtual machine.
pub(super) fn domain(
    client: &Client,
    admin: &Path,
    (name, profile): (&str, &str),
    memory: &MemorySize,
) -> Result<api::LaunchArgs, ClientError> {
    name_is_good(name).map_err(|what| wrong(what, "choose another name"))?;
    client.get::<api::Profile>(&format!("/v1/profiles/{}", client::segment(profile)))?;
    // The daemon's sockets lie beside each other unless its configuration says something else.
    let socket = admin.parent().unwrap_or(Path::new("/")).join(format!("{name}.sock"));
    Ok(launch::args(SocketVmm::Libvirt, Named { name, socket: &socket, profile: Some(profile) }, memory))
}

impl Hook {
    /// Does what is to be done; most that happens to a domain is of no concern.
    pub(super) fn run(self, client: &Client, mut domain: impl Read) -> Result<String, ClientError> {
        let makes = self.operation == "prepare" && self.when == "begin";
        let removes = self.operation == "release" && self.when == "end";
        if !makes && !removes {
            return Ok(String::new());
        }
        let mut text = String::new();
        let read = domain.by_ref().take(MAX_DOMAIN).read_to_string(&mut text);
        read.map_err(|error| wrong(format!("the domain's description: {error}"), "see libvirt's log"))?;
        let wanted = wanted(&text, &self.domain).map_err(|what| {
            wrong(format!("domain `{}`: {what}", self.domain), "`virsh edit` it; docs/libvirt.md has an example")
        })?;
        if removes {
            // The description may have been changed since: what was made is in the notes.
            let noted = read_note(&self.note(&self.domain)).map(|(vm, _)| vm);
            let vm = noted.or(wanted.map(|wanted| wanted.vm));
            return vm.map_or(Ok(String::new()), |vm| self.remove(client, &self.domain, &vm).map(|()| String::new()));
        }
        self.remove_left(client);
        match wanted {
            Some(wanted) => self.make(client, &wanted).map(|()| String::new()),
            None => Ok(String::new()),
        }
    }

    /// The file in which it is written down which virtual machine was made for a domain.
    fn note(&self, domain: &str) -> PathBuf {
        self.notes.join(client::segment(domain))
    }

    fn make(&self, client: &Client, wanted: &Wanted) -> Result<(), ClientError> {
        let Wanted { vm, keys, user, passed } = wanted;
        // Of a start that was cut off. One that a VMM uses is another's.
        let path = format!("/v1/vms/{}", client::segment(vm));
        match client.get::<api::Vm>(&path) {
            Ok(there) if there.state == api::VmState::Connected => {
                return Err(wrong(
                    format!("a VMM uses the VM `{vm}`"),
                    "give the domain another name in the element `vgpu`",
                ));
            }
            Ok(_) if self.note(&self.domain).exists() => client.delete(&path)?,
            Ok(_) => {
                let what = format!("there is a VM `{vm}` that this hook has not made");
                return Err(wrong(what, "leave the element `vgpu` out to use it, or name another in it"));
            }
            Err(ClientError::Ask(AskError::Refused(error))) if error.code == ErrorCode::NotFound => {}
            Err(error) => return Err(error),
        }
        let file = |path: &Path| {
            let path = path.to_owned();
            move |source| ClientError::File { path, source }
        };
        fs::create_dir_all(&self.notes).map_err(file(&self.notes))?;
        let note = self.note(&self.domain);
        fs::write(&note, format!("{vm} {}\n", self.boot())).map_err(file(&note))?;
        let made = client.post::<api::Vm>("/v1/vms", keys).and_then(|made| {
            let socket = made.socket.unwrap_or_default();
            let shown = socket.display().to_string();
            if !passed.iter().any(|word| word.contains(&format!("\"{shown}\""))) {
                let what = format!("no device of it names the socket {shown} of its vGPU");
                return Err(wrong(
                    what,
                    &format!("take the element `qemu:commandline` of `mediatorctl vm launch-args {vm} --vmm libvirt`"),
                ));
            }
            self.hand_over(&socket, user.as_deref()).map_err(file(&socket))
        });
        if made.is_err() {
            // The domain does not start, so that nobody would remove it.
            let _ = self.remove(client, &self.domain, vm);
        }
        made
    }

    /// Gives the socket to the user that QEMU runs as, who alone may connect then.
    fn hand_over(&self, socket: &Path, user: Option<&str>) -> std::io::Result<()> {
        if !fs::symlink_metadata(socket)?.file_type().is_socket() {
            return Err(std::io::Error::other("expected a socket"));
        }
        let passwd = fs::read_to_string(&self.passwd)?;
        let number = |name: &str| {
            let mut lines = passwd.lines().map(|line| line.split(':'));
            lines.find_map(|mut fields| (fields.next()? == name).then(|| fields.nth(1)?.parse::<u32>().ok())?)
        };
        let uid = match user {
            Some(user) => number(user).ok_or_else(|| std::io::Error::other(format!("there is no user `{user}`")))?,
            // Without such a user QEMU runs as root.
            None => USERS.into_iter().find_map(number).unwrap_or(0),
        };
        lchown(socket, Some(uid), None)?;
        fs::set_permissions(socket, fs::Permissions::from_mode(0o600))
    }

    fn remove(&self, client: &Client, domain: &str, vm: &str) -> Result<(), ClientError> {
        match client.delete(&format!("/v1/vms/{}", client::segment(vm))) {
            Err(ClientError::Ask(AskError::Refused(error))) if error.code == ErrorCode::NotFound => {}
            done => done?,
        }
        // The note is the hook's own; without it, nothing is removed twice.
        let _ = fs::remove_file(self.note(domain));
        Ok(())
    }

    /// The number of the host's boot.
    fn boot(&self) -> String {
        fs::read_to_string(&self.boot).unwrap_or_default().trim().to_owned()
    }

    /// Removes what was made in an earlier boot of the host: of this one, libvirt tells when a domain has ended, also when it was
    /// away at that time. A daemon that cannot now is asked again with the next start.
    fn remove_left(&self, client: &Client) {
        let notes = fs::read_dir(&self.notes).into_iter().flatten().flatten();
        for note in notes.map(|note| note.path()).filter(|note| *note != self.note(&self.domain)) {
            let Some((vm, boot)) = read_note(&note) else { continue };
            if boot != self.boot() && self.remove(client, "", &vm).is_ok() {
                let _ = fs::remove_file(note);
            }
        }
    }
}

/// The virtual machine and the boot of a note.
fn read_note(path: &Path) -> Option<(String, String)> {
    let text = fs::read_to_string(path).ok()?;
    let (vm, boot) = text.trim().split_once(' ')?;
    Some((vm.to_owned(), boot.to_owned()))
}

/// Reads what a domain's description asks for, if it asks for something.
fn wanted(text: &str, domain: &str) -> Result<Option<Wanted>, String> {
    let mut reader = Reader::from_str(text);
    let (mut found, mut passed) = (None, Vec::new());
    loop {
        let event = reader.read_event().map_err(|error| format!("its description is no XML: {error}"))?;
        match event {
            Event::Start(element) | Event::Empty(element) => {
                let local = element.local_name();
                if local.as_ref() == "vgpu" && is_ours(&element, text)? {
                    if found.is_some() {
                        return Err("it has several elements `vgpu`, expected one".to_owned());
                    }
                    found = Some(asked(&element, domain)?);
                } else if element.name().as_ref() == "qemu:arg" {
                    passed.extend(
                        attributes(&element)?.into_iter().filter(|(key, _)| key == "value").map(|(_, value)| value),
                    );
                }
            }
            Event::Eof => break,
            _ => {}
        }
    }
    Ok(found.map(|found| Wanted { passed, ..found }))
}

/// Says whether an element is of our name space: it or one around it says so, which is enough for a word that nobody else has.
fn is_ours(element: &BytesStart<'_>, text: &str) -> Result<bool, String> {
    let own = attributes(element)?.iter().any(|(key, value)| key.starts_with("xmlns") && value == NAMESPACE);
    Ok(own || text.contains(NAMESPACE))
}

fn attributes(element: &BytesStart<'_>) -> Result<Vec<(String, String)>, String> {
    let attribute = |attribute: Result<quick_xml::events::attributes::Attribute<'_>, _>| {
        let attribute = attribute.map_err(|error| format!("its description is no XML: {error}"))?;
        let key = attribute.key.as_ref().to_owned();
        let value = attribute
            .normalized_value(XmlVersion::default())
            .map_err(|error| format!("its description is no XML: {error}"))?;
        Ok((key, value.into_owned()))
    };
    element.attributes().map(attribute).collect()
}

/// The keys of an element `vgpu`.
fn asked(element: &BytesStart<'_>, domain: &str) -> Result<Wanted, String> {
    let mut wanted = Wanted { vm: domain.to_owned(), ..Wanted::default() };
    let (mut memory, mut time) = (Map::new(), Map::new());
    for (key, value) in attributes(element)? {
        let number = || value.parse::<u64>().map_err(|_| format!("{key}: `{value}`, expected a number"));
        match key.as_str() {
            "vm" => wanted.vm.clone_from(&value),
            "card" | "profile" => drop(wanted.keys.insert(key, value.into())),
            "vram-mib" => drop(wanted.keys.insert("vram_mib".to_owned(), number()?.into())),
            "channels" => drop(wanted.keys.insert("channels".to_owned(), number()?.into())),
            "quota-mib" => drop(memory.insert("quota_mib".to_owned(), number()?.into())),
            "guarantee-mib" => drop(memory.insert("guarantee_mib".to_owned(), number()?.into())),
            "weight" => drop(time.insert("weight".to_owned(), number()?.into())),
            "class" => drop(time.insert("class".to_owned(), value.into())),
            "user" => wanted.user = Some(value),
            key if key.starts_with("xmlns") => {}
            key => {
                return Err(format!(
                    "the element `vgpu` has no `{key}`, expected vm, profile, card, vram-mib, quota-mib, guarantee-mib, weight, class, \
                     channels or user"
                ));
            }
        }
    }
    name_is_good(&wanted.vm).map_err(|what| format!("{what}; name the VM with `vm` in the element `vgpu`"))?;
    wanted.keys.insert("name".to_owned(), wanted.vm.clone().into());
    // Nobody but the daemon, until QEMU's user has it.
    wanted.keys.insert("mode".to_owned(), "0600".into());
    for (key, table) in [("memory", memory), ("time", time)] {
        if !table.is_empty() {
            wanted.keys.insert(key.to_owned(), table.into());
        }
    }
    Ok(wanted)
}

#[cfg(test)]
mod tests;
