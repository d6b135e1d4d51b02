//! The hook of libvirt: creates the vGPU of a domain before the domain starts, and removes it after the domain's end.
//!
//! libvirt runs the hook as root with the domain's description on standard input: `HOOK DOMAIN prepare begin -` before
//! QEMU starts, and `HOOK DOMAIN release end -` after QEMU has ended. libvirt also calls `release` after a kill, and at
//! its next start if it was not running at that time. If the hook fails before the start, libvirt cancels the start and
//! shows the hook's message.
//!
//! The hook writes a note for each VM that it creates, next to libvirt's own state, with the boot of the host. VMs that
//! remain after a power loss are therefore removed when the next domain starts. Each of its VMs has a label with a
//! unique number that is also in the note. The hook never removes another VM of the same name, or a VM that a VMM uses.
//! libvirt also calls `release` after a failed `prepare`.
//!
//! Sources: `hooks.html` of libvirt.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use admin_client::{AskError, sockets};
use clap::Args;
use quick_xml::events::{BytesStart, Event};
use quick_xml::{Reader, XmlVersion};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use api::ErrorCode;
use api::launch::{self, MemorySize, NAMESPACE, Named, SocketVmm};
use config::check::name_is_good;

use super::client::{self, Client, ClientError};

/// Maximum size of a domain's description, in bytes.
const MAX_DOMAIN: u64 = 4 << 20;
/// Users that run libvirt's QEMU processes: Debian's user, and the user of other distributions.
const USERS: [&str; 2] = ["libvirt-qemu", "qemu"];
/// A source of unique numbers.
const RANDOM: &str = "/proc/sys/kernel/random/uuid";
/// Label that contains the number of the preparation that created the VM.
const PREPARED: &str = "libvirt_prepared";
/// Label that contains the domain for which the VM was created.
const DOMAIN: &str = "libvirt_domain";
/// Maximum length of the value of this label.
const MAX_LABEL: usize = 100;
/// Maximum size of a note, in bytes.
const MAX_NOTE: u64 = 64 << 10;
/// Time limit for the daemon to notice that a VMM has ended.
// TIMEOUT: when libvirt calls `release`, QEMU's process and its connection have ended. Only a busy daemon needs longer.
const VMM_EXIT_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval at which the hook checks this.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Clone, Debug, Args)]
pub(super) struct Hook {
    /// Name of the domain
    domain: String,
    /// Event: prepare, start, started, stopped, release, reconnect and others
    operation: String,
    /// begin or end
    when: String,
    /// Further arguments from libvirt
    more: Vec<String>,
    /// File with users and groups, for tests
    #[arg(long, value_name = "PATH", default_value = "/etc/passwd", hide = true)]
    passwd: PathBuf,
    /// Folder with the hook's notes about the VMs that it has created
    #[arg(long, value_name = "PATH", default_value = "/var/lib/libvirt/gpu-mediator", hide = true)]
    notes: PathBuf,
    /// File with the ID of the host's boot
    #[arg(long, value_name = "PATH", default_value = "/proc/sys/kernel/random/boot_id", hide = true)]
    boot: PathBuf,
    /// Configuration file of the daemon, which names the folder of its sockets
    #[arg(long, value_name = "PATH", default_value = "/etc/gpu-mediator.toml", hide = true)]
    config: PathBuf,
}

/// The note about the preparation of a domain's vGPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Note {
    /// The virtual machine that the preparation created.
    vm: String,
    /// ID of the host's boot.
    boot: String,
    /// The domain's UUID, if its description has one.
    #[serde(default)]
    uuid: Option<String>,
    /// Number of the preparation, which is also a label of the VM.
    prepared: String,
}

/// Result of a removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Removed {
    /// The VM of the note no longer exists.
    Gone,
    /// A VMM uses the VM.
    InUse,
}

/// A domain's request for its vGPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Wanted {
    vm: String,
    keys: Map<String, Value>,
    /// User that will own the socket.
    user: Option<String>,
    /// All arguments that the domain passes to QEMU unchanged.
    passed: Vec<String>,
}

fn wrong(error: String, what_to_do: &str) -> ClientError {
    AskError::Refused(api::Error { code: ErrorCode::Invalid, error, what_to_do: what_to_do.to_owned() }).into()
}

/// Returns a domain whose vGPU the hook creates from a profile.
///
/// # Errors
/// Returns an error if the daemon has no such profile, or the name is not valid for a virtual machine.
pub(super) fn domain(
    client: &Client,
    admin: &Path,
    name: &str,
    profile: &str,
    memory: &MemorySize,
) -> Result<api::LaunchArgs, ClientError> {
    name_is_good(name).map_err(|what| wrong(what, "choose another name"))?;
    client.get::<api::Profile>(&format!("/v1/profiles/{}", client::segment(profile)))?;
    // The daemon's sockets are in one folder, unless its configuration says otherwise.
    let socket = admin.parent().unwrap_or(Path::new("/")).join(format!("{name}.sock"));
    Ok(launch::args(
        SocketVmm::Libvirt,
        Named { name, socket: &socket, profile: Some(profile), is_cuda: false },
        memory,
    ))
}

impl Hook {
    /// Handles an event. Most events of a domain need no action.
    pub(super) fn run(self, client: &Client, mut domain: impl Read) -> Result<String, ClientError> {
        let makes = self.operation == "prepare" && self.when == "begin";
        let removes = self.operation == "release" && self.when == "end";
        if !makes && !removes {
            return Ok(String::new());
        }
        let mut text = String::new();
        let read = domain.by_ref().take(MAX_DOMAIN).read_to_string(&mut text);
        read.map_err(|error| wrong(format!("the domain's description: {error}"), "see libvirt's log"))?;
        if removes {
            return self.release(client, uuid(&text)).map(|()| String::new());
        }
        let wanted = wanted(&text, &self.domain).map_err(|what| {
            wrong(format!("domain `{}`: {what}", self.domain), "`virsh edit` it; docs/guides/libvirt.md has an example")
        })?;
        self.remove_left(client);
        match wanted {
            Some(wanted) => self.make(client, &wanted, uuid(&text)).map(|()| String::new()),
            None => Ok(String::new()),
        }
    }

    /// Removes only the VM that this domain's preparation has created. The description may have changed since then.
    fn release(&self, client: &Client, uuid: Option<String>) -> Result<(), ClientError> {
        let path = self.note(&self.domain);
        let Some(note) = read_note(&path) else { return Ok(()) };
        // A domain of this name that libvirt has lost may still be running.
        if note.uuid.is_some() && uuid.is_some() && note.uuid != uuid {
            return Ok(());
        }
        match remove(client, &note, VMM_EXIT_TIMEOUT)? {
            Removed::Gone => {
                // Removing the note prevents a second removal of the VM.
                let _ = fs::remove_file(path);
                Ok(())
            }
            Removed::InUse => {
                let vm = &note.vm;
                Err(wrong(
                    format!("a VMM still uses the VM `{vm}`, which is not removed"),
                    &format!("see `mediatorctl vm show {vm}`; end that process, then `mediatorctl vm remove {vm}`"),
                ))
            }
        }
    }

    /// Returns the file with the note about a domain's virtual machine.
    fn note(&self, domain: &str) -> PathBuf {
        self.notes.join(client::segment(domain))
    }

    fn make(&self, client: &Client, wanted: &Wanted, uuid: Option<String>) -> Result<(), ClientError> {
        let Wanted { vm, keys, user, passed } = wanted;
        let note = self.note(&self.domain);
        // The VM remains from an interrupted start. A VM that a VMM uses belongs to another domain.
        let path = format!("/v1/vms/{}", client::segment(vm));
        match client.get::<api::Vm>(&path) {
            Ok(there) if there.state == api::VmState::Connected => {
                return Err(wrong(
                    format!("a VMM uses the VM `{vm}`"),
                    "give the domain another name in the element `vgpu`",
                ));
            }
            Ok(there) if read_note(&note).is_some_and(|note| note.is_of(&there)) => client.delete(&path)?,
            Ok(_) => {
                let what = format!("this hook has not created the existing VM `{vm}`");
                return Err(wrong(what, "leave the element `vgpu` out to use it, or name another in it"));
            }
            Err(ClientError::Ask(AskError::Refused(error))) if error.code == ErrorCode::NotFound => {}
            Err(error) => return Err(error),
        }
        let file = |path: &Path| {
            let path = path.to_owned();
            move |source| ClientError::File { path, source }
        };
        let prepared = fs::read_to_string(RANDOM).map_err(file(Path::new(RANDOM)))?.trim().to_owned();
        let new = Note { vm: vm.clone(), boot: self.boot(), uuid, prepared: prepared.clone() };
        let text = serde_json::to_vec(&new).map_err(|error| ClientError::protocol(error.to_string()))?;
        cdi_spec::replace(&note, &text, 0o600).map_err(file(&note))?;
        let mut keys = keys.clone();
        let domain: String = client::segment(&self.domain).chars().take(MAX_LABEL).collect();
        keys.insert("labels".to_owned(), json!({ PREPARED: prepared, DOMAIN: domain }));
        let made = client.post::<api::Vm>("/v1/vms", &keys).and_then(|made| {
            let socket = made.socket.unwrap_or_default();
            let shown = socket.display().to_string();
            if !passed.iter().any(|word| word.contains(&format!("\"{shown}\""))) {
                let what = format!("none of its devices names the socket {shown} of its vGPU");
                return Err(wrong(
                    what,
                    &format!("take the element `qemu:commandline` of `mediatorctl vm launch-args {vm} --vmm libvirt`"),
                ));
            }
            self.hand_over(&socket, user.as_deref()).map_err(file(&socket))
        });
        if made.is_err() {
            // The domain does not start, and libvirt may not call `release`.
            if matches!(remove(client, &new, Duration::ZERO), Ok(Removed::Gone)) {
                let _ = fs::remove_file(&note);
            }
        }
        made
    }

    /// Makes QEMU's user the owner of the socket, so that only this user can connect.
    fn hand_over(&self, socket: &Path, user: Option<&str>) -> std::io::Result<()> {
        let passwd = fs::read_to_string(&self.passwd)?;
        let number = |name: &str| {
            let mut lines = passwd.lines().map(|line| line.split(':'));
            lines.find_map(|mut fields| (fields.next()? == name).then(|| fields.nth(1)?.parse::<u32>().ok())?)
        };
        let uid = match user {
            Some(user) => number(user).ok_or_else(|| std::io::Error::other(format!("there is no user `{user}`")))?,
            // Without such a user, QEMU runs as root.
            None => USERS.into_iter().find_map(number).unwrap_or(0),
        };
        sockets::give(&self.socket_dir()?, socket, uid)
    }

    /// Returns the folder of the daemon's sockets, as configured.
    fn socket_dir(&self) -> std::io::Result<PathBuf> {
        let text = match fs::read_to_string(&self.config) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            text => text?,
        };
        let table: toml::Table = text.parse().map_err(std::io::Error::other)?;
        let folder = table.get("daemon").and_then(|daemon| daemon.get("socket_dir")).and_then(|folder| folder.as_str());
        Ok(folder.map_or_else(|| config::DaemonSpec::default().socket_dir, PathBuf::from))
    }

    /// Returns the ID of the host's boot.
    fn boot(&self) -> String {
        fs::read_to_string(&self.boot).unwrap_or_default().trim().to_owned()
    }

    /// Removes VMs that were created in an earlier boot of the host. In the current boot, libvirt reports the end of
    /// each domain, even if libvirt was down at that time. If the daemon cannot remove a VM now, the next start of a
    /// domain retries.
    fn remove_left(&self, client: &Client) {
        let notes = fs::read_dir(&self.notes).into_iter().flatten().flatten();
        for note in notes.map(|note| note.path()).filter(|note| *note != self.note(&self.domain)) {
            let Some(left) = read_note(&note) else { continue };
            if left.boot != self.boot() && matches!(remove(client, &left, Duration::ZERO), Ok(Removed::Gone)) {
                let _ = fs::remove_file(note);
            }
        }
    }
}

impl Note {
    /// Returns true if this preparation created the virtual machine, so that it is not another one with the same name.
    fn is_of(&self, vm: &api::Vm) -> bool {
        let labelled = vm.labels.iter().find(|(key, _)| *key == PREPARED).map(|(_, number)| number);
        self.vm == vm.name && labelled == Some(self.prepared.as_str())
    }
}

/// Removes the virtual machine of a note, if it still exists and no VMM uses it after `patience`.
fn remove(client: &Client, note: &Note, patience: Duration) -> Result<Removed, ClientError> {
    let path = format!("/v1/vms/{}", client::segment(&note.vm));
    let is_gone = |error: &ClientError| matches!(error, ClientError::Ask(AskError::Refused(error)) if error.code == ErrorCode::NotFound);
    let begin = Instant::now();
    loop {
        match client.get::<api::Vm>(&path) {
            Ok(there) if !note.is_of(&there) => return Ok(Removed::Gone),
            Ok(there) if there.state != api::VmState::Connected => break,
            Ok(_) if begin.elapsed() >= patience => return Ok(Removed::InUse),
            Ok(_) => std::thread::sleep(POLL_INTERVAL),
            Err(error) if is_gone(&error) => return Ok(Removed::Gone),
            Err(error) => return Err(error),
        }
    }
    match client.delete(&path) {
        Err(error) if is_gone(&error) => Ok(Removed::Gone),
        done => done.map(|()| Removed::Gone),
    }
}

/// Reads a note.
fn read_note(path: &Path) -> Option<Note> {
    let mut text = String::new();
    fs::File::open(path).ok()?.take(MAX_NOTE).read_to_string(&mut text).ok()?;
    serde_json::from_str(&text).ok()
}

/// Returns the UUID in a domain's description. Its element precedes all text that users have written.
fn uuid(text: &str) -> Option<String> {
    let before = text.split("<metadata").next().unwrap_or_default();
    let (_, behind) = before.split_once("<uuid>")?;
    let (uuid, _) = behind.split_once("</uuid>")?;
    Some(uuid.trim().chars().take(64).collect())
}

/// Reads the vGPU that a domain's description requests, if any.
fn wanted(text: &str, domain: &str) -> Result<Option<Wanted>, String> {
    let mut reader = Reader::from_str(text);
    let (mut found, mut passed) = (None, Vec::new());
    loop {
        let event = reader.read_event().map_err(|error| format!("its description is not XML: {error}"))?;
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

/// Returns true if an element is in our name space: the element or an enclosing one declares the name space. This test
/// suffices for a unique word.
fn is_ours(element: &BytesStart<'_>, text: &str) -> Result<bool, String> {
    let own = attributes(element)?.iter().any(|(key, value)| key.starts_with("xmlns") && value == NAMESPACE);
    Ok(own || text.contains(NAMESPACE))
}

fn attributes(element: &BytesStart<'_>) -> Result<Vec<(String, String)>, String> {
    let attribute = |attribute: Result<quick_xml::events::attributes::Attribute<'_>, _>| {
        let attribute = attribute.map_err(|error| format!("its description is not XML: {error}"))?;
        let key = attribute.key.as_ref().to_owned();
        let value = attribute
            .normalized_value(XmlVersion::default())
            .map_err(|error| format!("its description is not XML: {error}"))?;
        Ok((key, value.into_owned()))
    };
    element.attributes().map(attribute).collect()
}

/// Returns the keys of an element `vgpu`.
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
    // Only the daemon may connect until QEMU's user owns the socket.
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
