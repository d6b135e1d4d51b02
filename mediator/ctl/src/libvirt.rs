//! libvirt's hook: creates a domain's vGPU before the domain starts, and removes it after the domain has stopped.
//!
//! libvirt runs the hook as root with the domain XML on standard input: `HOOK DOMAIN prepare begin -` before QEMU
//! starts, and `HOOK DOMAIN release end -` after QEMU has exited. libvirt also calls `release` if QEMU was killed. If
//! libvirt was down when QEMU exited, it calls `release` at its next startup. If `prepare` fails, libvirt cancels the
//! start and shows the hook's message.
//!
//! The hook writes a note with the host's boot ID for each VM that it creates, next to libvirt's own state. Therefore,
//! VMs that remain after a power loss are removed when the next domain starts. Each of the hook's VMs has a label with
//! a unique ID, which the note also contains. Therefore, the hook never removes another VM with the same name. It also
//! keeps VMs that a VMM is using. libvirt also calls `release` after a failed `prepare`.
//!
//! Source: libvirt's `hooks.html`.

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

/// Maximum size of a domain's XML, in bytes.
const MAX_DOMAIN: u64 = 4 << 20;
/// Users that run libvirt's QEMU processes, on Debian and on other distributions.
const USERS: [&str; 2] = ["libvirt-qemu", "qemu"];
/// Source of unique IDs.
const RANDOM: &str = "/proc/sys/kernel/random/uuid";
/// Label with the ID of the preparation that created the VM.
const PREPARED: &str = "libvirt_prepared";
/// Label with the name of the VM's domain.
const DOMAIN: &str = "libvirt_domain";
/// Maximum length of the value of the label [`DOMAIN`], in characters.
const MAX_LABEL: usize = 100;
/// Maximum size of a note, in bytes.
const MAX_NOTE: u64 = 64 << 10;
/// Time limit for the daemon to detect that a VMM has exited.
// TIMEOUT: when libvirt calls `release`, QEMU has exited and its connection is closed. Only a busy daemon takes time to
// detect this.
const VMM_EXIT_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval at which the hook polls for the VMM's exit.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Clone, Debug, Args)]
pub(super) struct Hook {
    /// Name of the domain
    domain: String,
    /// Event, such as prepare, start, started, stopped, release or reconnect
    operation: String,
    /// Phase of the event: begin or end
    when: String,
    /// Additional arguments from libvirt
    more: Vec<String>,
    /// File with users and groups, for tests
    #[arg(long, value_name = "PATH", default_value = "/etc/passwd", hide = true)]
    passwd: PathBuf,
    /// Folder for the hook's notes about the VMs that it has created
    #[arg(long, value_name = "PATH", default_value = "/var/lib/libvirt/gpu-mediator", hide = true)]
    notes: PathBuf,
    /// File that contains the host's boot ID
    #[arg(long, value_name = "PATH", default_value = "/proc/sys/kernel/random/boot_id", hide = true)]
    boot: PathBuf,
    /// Configuration file of the daemon, which sets the socket folder
    #[arg(long, value_name = "PATH", default_value = "/etc/gpu-mediator.toml", hide = true)]
    config: PathBuf,
}

/// Note about the preparation of a domain's vGPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Note {
    /// Virtual machine created by the preparation.
    vm: String,
    /// The host's boot ID.
    boot: String,
    /// The domain's UUID, if its XML contains one.
    #[serde(default)]
    uuid: Option<String>,
    /// ID of the preparation, which is also a label of the VM.
    prepared: String,
}

/// Result of removing a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Removed {
    /// The note's VM no longer exists.
    Gone,
    /// A VMM is using the VM.
    InUse,
}

/// A domain's request for a vGPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Wanted {
    vm: String,
    keys: Map<String, Value>,
    /// User that will own the socket.
    user: Option<String>,
    /// All arguments that the domain passes through to QEMU.
    passed: Vec<String>,
}

fn wrong(error: String, what_to_do: &str) -> ClientError {
    AskError::Refused(api::Error { code: ErrorCode::Invalid, error, what_to_do: what_to_do.to_owned() }).into()
}

/// Returns a domain whose vGPU the hook creates from a profile.
///
/// # Errors
/// Returns an error if the daemon has no such profile, or if the name is not a valid VM name.
pub(super) fn domain(
    client: &Client,
    admin: &Path,
    name: &str,
    profile: &str,
    memory: &MemorySize,
) -> Result<api::LaunchArgs, ClientError> {
    name_is_good(name).map_err(|what| wrong(what, "choose another name"))?;
    client.get::<api::Profile>(&format!("/v1/profiles/{}", client::segment(profile)))?;
    // The daemon's sockets are in one folder unless configured otherwise.
    let socket = admin.parent().unwrap_or(Path::new("/")).join(format!("{name}.sock"));
    Ok(launch::args(
        SocketVmm::Libvirt,
        Named { name, socket: &socket, profile: Some(profile), is_cuda: false },
        memory,
    ))
}

impl Hook {
    /// Handles an event: creates the vGPU at `prepare begin`, removes it at `release end`, and ignores all other
    /// events.
    pub(super) fn run(self, client: &Client, mut domain: impl Read) -> Result<String, ClientError> {
        let makes = self.operation == "prepare" && self.when == "begin";
        let removes = self.operation == "release" && self.when == "end";
        if !makes && !removes {
            return Ok(String::new());
        }
        let mut text = String::new();
        let read = domain.by_ref().take(MAX_DOMAIN).read_to_string(&mut text);
        read.map_err(|error| wrong(format!("the domain XML: {error}"), "see libvirt's log"))?;
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

    /// Removes the VM only if it was created for this domain. The domain's XML may have changed since then.
    fn release(&self, client: &Client, uuid: Option<String>) -> Result<(), ClientError> {
        let path = self.note(&self.domain);
        let Some(note) = read_note(&path) else { return Ok(()) };
        // Keep the VM of a different domain with this name, which may still be running although libvirt no longer knows
        // it.
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
                    format!("a VMM still uses the VM `{vm}`, so it was not removed"),
                    &format!(
                        "see `mediatorctl vm show {vm}`; stop that process, then run `mediatorctl vm remove {vm}`"
                    ),
                ))
            }
        }
    }

    /// Returns the path of the note about a domain's virtual machine.
    fn note(&self, domain: &str) -> PathBuf {
        self.notes.join(client::segment(domain))
    }

    fn make(&self, client: &Client, wanted: &Wanted, uuid: Option<String>) -> Result<(), ClientError> {
        let Wanted { vm, keys, user, passed } = wanted;
        let note = self.note(&self.domain);
        // A VM with the domain's note is left over from an interrupted start, and is replaced. A VM that a VMM is using
        // belongs to another domain.
        let path = format!("/v1/vms/{}", client::segment(vm));
        match client.get::<api::Vm>(&path) {
            Ok(there) if there.state == api::VmState::Connected => {
                return Err(wrong(format!("a VMM uses the VM `{vm}`"), "choose another VM name in the element `vgpu`"));
            }
            Ok(there) if read_note(&note).is_some_and(|note| note.is_of(&there)) => client.delete(&path)?,
            Ok(_) => {
                let what = format!("the existing VM `{vm}` was not created by this hook");
                return Err(wrong(
                    what,
                    "omit the element `vgpu` to use this VM, or choose another VM name in the element",
                ));
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
                let what = format!("none of its devices uses the socket {shown} of its vGPU");
                return Err(wrong(
                    what,
                    &format!(
                        "copy the element `qemu:commandline` from `mediatorctl vm launch-args {vm} --vmm libvirt`"
                    ),
                ));
            }
            self.hand_over(&socket, user.as_deref()).map_err(file(&socket))
        });
        if made.is_err() {
            // Remove the VM now, because the domain will not start and libvirt may not call `release`.
            if matches!(remove(client, &new, Duration::ZERO), Ok(Removed::Gone)) {
                let _ = fs::remove_file(&note);
            }
        }
        made
    }

    /// Changes the socket's owner to QEMU's user, so that only this user can connect.
    fn hand_over(&self, socket: &Path, user: Option<&str>) -> std::io::Result<()> {
        let passwd = fs::read_to_string(&self.passwd)?;
        let number = |name: &str| {
            let mut lines = passwd.lines().map(|line| line.split(':'));
            lines.find_map(|mut fields| (fields.next()? == name).then(|| fields.nth(1)?.parse::<u32>().ok())?)
        };
        let uid = match user {
            Some(user) => {
                number(user).ok_or_else(|| std::io::Error::other(format!("the user `{user}` does not exist")))?
            }
            // Without such a user, QEMU runs as root.
            None => USERS.into_iter().find_map(number).unwrap_or(0),
        };
        sockets::give(&self.socket_dir()?, socket, uid)
    }

    /// Returns the configured folder of the daemon's sockets.
    fn socket_dir(&self) -> std::io::Result<PathBuf> {
        let text = match fs::read_to_string(&self.config) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            text => text?,
        };
        let table: toml::Table = text.parse().map_err(std::io::Error::other)?;
        let folder = table.get("daemon").and_then(|daemon| daemon.get("socket_dir")).and_then(|folder| folder.as_str());
        Ok(folder.map_or_else(|| config::DaemonSpec::default().socket_dir, PathBuf::from))
    }

    /// Returns the host's boot ID.
    fn boot(&self) -> String {
        fs::read_to_string(&self.boot).unwrap_or_default().trim().to_owned()
    }

    /// Removes other domains' VMs that were created in an earlier boot of the host. Within a boot, libvirt reports the
    /// end of every domain, even if libvirt was down when the domain ended. If the daemon cannot remove a VM now, the
    /// next domain start retries.
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
    /// Returns true if this preparation created the virtual machine; false for another one with the same name.
    fn is_of(&self, vm: &api::Vm) -> bool {
        let labelled = vm.labels.iter().find(|(key, _)| *key == PREPARED).map(|(_, number)| number);
        self.vm == vm.name && labelled == Some(self.prepared.as_str())
    }
}

/// Removes a note's virtual machine if it still exists. Waits up to `patience` for its VMM to exit, and keeps the VM if
/// the VMM still uses it.
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

/// Reads a note. Returns `None` if it is missing or invalid.
fn read_note(path: &Path) -> Option<Note> {
    let mut text = String::new();
    fs::File::open(path).ok()?.take(MAX_NOTE).read_to_string(&mut text).ok()?;
    serde_json::from_str(&text).ok()
}

/// Returns the UUID in a domain's XML. Ignores the metadata and everything after it, which can contain other elements
/// named `uuid`.
fn uuid(text: &str) -> Option<String> {
    let before = text.split("<metadata").next().unwrap_or_default();
    let (_, behind) = before.split_once("<uuid>")?;
    let (uuid, _) = behind.split_once("</uuid>")?;
    Some(uuid.trim().chars().take(64).collect())
}

/// Parses the vGPU requested in a domain's XML, if any.
fn wanted(text: &str, domain: &str) -> Result<Option<Wanted>, String> {
    let mut reader = Reader::from_str(text);
    let (mut found, mut passed) = (None, Vec::new());
    loop {
        let event = reader.read_event().map_err(|error| format!("its description is not valid XML: {error}"))?;
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

/// Returns true if the element or another part of the domain's XML contains our namespace. The namespace is unique, so
/// a text search is sufficient.
fn is_ours(element: &BytesStart<'_>, text: &str) -> Result<bool, String> {
    let own = attributes(element)?.iter().any(|(key, value)| key.starts_with("xmlns") && value == NAMESPACE);
    Ok(own || text.contains(NAMESPACE))
}

fn attributes(element: &BytesStart<'_>) -> Result<Vec<(String, String)>, String> {
    let attribute = |attribute: Result<quick_xml::events::attributes::Attribute<'_>, _>| {
        let attribute = attribute.map_err(|error| format!("its description is not valid XML: {error}"))?;
        let key = attribute.key.as_ref().to_owned();
        let value = attribute
            .normalized_value(XmlVersion::default())
            .map_err(|error| format!("its description is not valid XML: {error}"))?;
        Ok((key, value.into_owned()))
    };
    element.attributes().map(attribute).collect()
}

/// Converts a `vgpu` element to a request for a vGPU.
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
    name_is_good(&wanted.vm).map_err(|what| format!("{what}; set the VM's name with `vm` in the element `vgpu`"))?;
    wanted.keys.insert("name".to_owned(), wanted.vm.clone().into());
    // Only the daemon's user can connect until QEMU's user owns the socket.
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
