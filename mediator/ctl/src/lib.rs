//! `mediatorctl`: a thin client of the admin API.
//!
//! Modules: the command line (this file), `tenant` (tenants of CUDA cards), `cdi` (CDI files for containers), `profile`
//! (templates for tenants and virtual machines), `host` (the host's own cards), `moving` (moves of virtual machines
//! between cards), `sched` (division of cards' time), [`report`] (charts of this division), [`replay`] (replays of
//! scheduler recordings), `top` (a live view), `desired` (desired states in files), `doctor` (host checks), `events`
//! (the daemon's events), `libvirt` (libvirt's hook), `watch` (repeated commands), `pages` (man pages and shell
//! completion), `sections` (sections of man pages), `progress` (progress of slow commands), `colours` (colours on
//! terminals), [`client`] (HTTP over the socket), [`output`] (tables), [`values`] (values with a unit).
//!
//! Exit codes ([`Code`]) are part of the interface, as are `--output json` and `yaml`, which print the API's responses
//! unchanged.
//!
//! The crate does not change virtual machines, tenants or cards itself, except for a card's host driver: it sends
//! requests to the daemon.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use admin_client::AskError;
use clap::{Args, Parser, Subcommand};
use serde_json::{Map, Value};

use api::launch::{MemorySize, Vmm};
use api::{self, ErrorCode};
use config::patch::table;
use config::{Apertures, DEFAULT_ADMIN_SOCKET, FunctionSpec, LabelMatch, Paravirtual, SocketMode, VmSpec};

mod cdi;
pub mod client;
mod colours;
mod daemon;
mod desired;
mod doctor;
mod events;
mod examples;
mod firmware;
mod forms;
mod host;
mod libvirt;
mod memory;
mod moving;
pub mod output;
mod pages;
mod profile;
mod progress;
pub mod replay;
pub mod report;
mod saving;
mod sched;
mod sections;
mod tenant;
mod top;
mod usage;
pub mod values;
mod watch;

#[cfg(test)]
mod tests;

use client::{Client, ClientError};
use colours::{Colours, Painted};
use forms::{Form, json};
use watch::Watch;

/// Exit code of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Code {
    /// The command succeeded.
    Good = 0,
    /// The command failed.
    Failed = 1,
    /// The command or one of its values is invalid.
    Usage = 2,
    /// No virtual machine, tenant, card or profile has this name.
    NotFound = 3,
    /// The current state does not permit the change, or the card has too few resources left.
    Conflict = 4,
    /// The daemon does not respond, or the user has no access to its socket.
    Unreachable = 5,
}

/// Heading of the options that all commands have.
const GLOBAL: &str = "Global options";

/// Shows and changes mediatord's virtual machines, tenants and cards
#[derive(Clone, Debug, Parser)]
#[command(
    name = "mediatorctl",
    version,
    after_help = "Exit codes: 0 done, 1 failed, 2 invalid usage or value, 3 not found, 4 conflict or quota, \
                  5 daemon unreachable"
)]
struct Arguments {
    /// Admin socket of the daemon
    #[arg(long, global = true, help_heading = GLOBAL, value_name = "PATH", env = "MEDIATORCTL_SOCKET", default_value = DEFAULT_ADMIN_SOCKET)]
    socket: PathBuf,
    /// Format of the output
    #[arg(short, long, global = true, help_heading = GLOBAL, value_name = "FORM", default_value = "table")]
    output: Form,
    /// Same as --output json
    #[arg(long, global = true, help_heading = GLOBAL, conflicts_with = "output")]
    json: bool,
    /// Makes the change only if the daemon's state still has this revision (see `mediatorctl export`)
    #[arg(long, global = true, help_heading = GLOBAL, value_name = "REVISION", value_parser = values::revision)]
    if_revision: Option<String>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Clone, Debug, Subcommand)]
enum Command {
    /// Virtual machines
    #[command(subcommand)]
    Vm(VmCommand),
    /// Cards
    #[command(subcommand)]
    Card(CardCommand),
    /// The daemon itself
    #[command(subcommand)]
    Daemon(daemon::DaemonCommand),
    /// Sharing of the cards' time
    #[command(subcommand)]
    Sched(sched::SchedCommand),
    /// Placement and division of the cards' memory
    #[command(subcommand)]
    Memory(memory::MemoryCommand),
    /// Tenants of CUDA cards
    #[command(subcommand)]
    Tenant(tenant::TenantCommand),
    /// Profiles: named sets of limits for virtual machines and tenants
    #[command(subcommand)]
    Profile(profile::ProfileCommand),
    /// Runs a CUDA program as a tenant
    Run(Box<tenant::Run>),
    /// Shows live usage of the cards: entitled and received shares, waits, strikes
    Top(top::Top),
    Events(events::Events),
    /// Creates and changes the virtual machines, tenants and settings in a file; others stay unchanged
    Apply(desired::Apply),
    /// Prints virtual machines, tenants and settings as a file for `apply` and `assert`
    Export(desired::Export),
    /// Compares virtual machines, tenants and settings with a file; exits with 0 if all match, and with 1 otherwise
    Assert(desired::Assert),
    /// Checks this host for missing requirements and prints how to fix them; exits with 0 if nothing is missing, and
    /// with 1 otherwise
    Doctor(doctor::Doctor),
    /// Prints the admin API as an OpenAPI document
    Schema,
    /// Prints a shell completion script for mediatorctl
    Completion {
        /// Name of the shell
        shell: pages::Shell,
    },
    /// Handles a call of libvirt's QEMU hook, with the domain XML on standard input
    #[command(hide = true)]
    LibvirtHook(libvirt::Hook),
    /// Writes the man pages of gpu-mediator
    #[command(hide = true)]
    Man {
        /// Existing folder to write the pages to
        folder: PathBuf,
    },
}

impl Command {
    /// Returns the interval at which to repeat the command, if repetition was requested.
    fn watch(&self) -> Option<std::time::Duration> {
        match self {
            Self::Vm(VmCommand::List { watch } | VmCommand::Show { watch, .. })
            | Self::Card(CardCommand::Show { watch, .. })
            | Self::Sched(sched::SchedCommand::Show { watch, .. })
            | Self::Profile(profile::ProfileCommand::List { watch } | profile::ProfileCommand::Show { watch, .. })
            | Self::Tenant(tenant::TenantCommand::List { watch } | tenant::TenantCommand::Show { watch, .. })
            | Self::Memory(memory::MemoryCommand::Show { watch, .. }) => watch.interval(),
            _ => None,
        }
    }
}

#[derive(Clone, Debug, Subcommand)]
enum VmCommand {
    /// Adds a virtual machine; its socket exists when the command returns
    Add(Box<Add>),
    /// Removes a virtual machine, even while its VMM is connected
    Remove {
        /// Name of the virtual machine
        name: String,
    },
    /// Moves a virtual machine to another card while its VMM is connected and its guest runs
    Move {
        /// Name of the virtual machine
        name: String,
        /// Target card; by default, the daemon's policy chooses one
        #[arg(long, value_name = "NAME")]
        card: Option<String>,
    },
    /// Saves a virtual machine's GPU state and VRAM to a file; its VMM must have paused the guest
    Save {
        /// Name of the virtual machine
        name: String,
        /// File to write, readable only by its owner
        file: PathBuf,
        /// Replaces an existing file
        #[arg(long)]
        force: bool,
    },
    /// Restores a virtual machine's GPU state and VRAM from a file; its VMM must have restored the RAM and paused the
    /// guest
    Restore {
        /// Name of the virtual machine
        name: String,
        /// File written by `vm save`
        file: PathBuf,
    },
    /// Continues a virtual machine's CUDA programs in new workers; the programs notice only a pause
    RestartWorkers {
        /// Name of the virtual machine
        name: String,
        /// Process ID of a program in the guest; by default, all programs
        #[arg(long, value_name = "PID")]
        pid: Option<u32>,
    },
    /// Lists the virtual machines
    List {
        #[command(flatten)]
        watch: Watch,
    },
    /// Shows one virtual machine in detail
    Show {
        /// Name of the virtual machine
        name: String,
        #[command(flatten)]
        watch: Watch,
    },
    /// Prints the arguments that connect a VMM
    LaunchArgs {
        /// Name of the virtual machine
        name: String,
        /// With --vmm libvirt: prints a domain whose vGPU the hook creates from this profile; the VM need not exist yet
        #[arg(long, value_name = "NAME")]
        profile: Option<String>,
        /// VMM; by default qemu, or xen for a Xen domain
        #[arg(long)]
        vmm: Option<Vmm>,
        /// Guest RAM size, such as 512M or 2G
        #[arg(long, value_name = "SIZE", default_value = "2G")]
        memory: MemorySize,
    },
}

#[derive(Clone, Debug, Args)]
struct Add {
    /// Name of the virtual machine
    name: String,
    /// Card of the virtual machine; by default, the daemon's policy chooses one
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    card: String,
    /// Profile that provides the values of omitted options
    #[arg(long, value_name = "NAME", conflicts_with = "passthrough")]
    profile: Option<String>,
    /// VRAM size that the guest sees, such as 2G
    #[arg(long, value_name = "SIZE", value_parser = values::mib, required_unless_present_any = ["passthrough", "profile"], conflicts_with = "passthrough")]
    vram_mib: Option<u64>,
    /// Maximum number of channels of the guest
    #[arg(long, value_name = "COUNT")]
    channels: Option<u32>,
    /// Time that a channel may occupy an engine without progress, in milliseconds; 0 means no limit
    #[arg(long, value_name = "MS")]
    hang_limit_ms: Option<u64>,
    #[command(flatten)]
    memory: memory::MemoryFlags,
    #[command(flatten)]
    time: sched::TimeFlags,
    /// Offers the guest the paravirtual interface
    #[arg(long, conflicts_with = "passthrough")]
    paravirtual: bool,
    /// Lets the guest share segments of device memory with VMs of this group
    #[arg(long, value_name = "GROUP", requires = "paravirtual")]
    share_group: Option<String>,
    /// Lets the guest's programs use CUDA, on a card of kind "cuda"
    #[arg(long, conflicts_with_all = ["passthrough", "paravirtual", "channels", "hang_limit_ms", "xen_domain"])]
    cuda: bool,
    /// Size of the host memory that the guest's CUDA programs share with the card, in addition to RAM, in MiB; a power
    /// of two
    #[arg(long, value_name = "MIB", requires = "cuda", value_parser = config::size::mib)]
    cuda_window_mib: Option<u64>,
    /// Name or ID of the virtual machine's Xen HVM domain; the VM then has no socket
    #[arg(long, help_heading = "Socket", value_name = "DOMAIN", conflicts_with_all = ["socket_path", "owner", "group"])]
    xen_domain: Option<String>,
    /// Path of the socket; by default, NAME.sock in the daemon's socket folder
    #[arg(long, help_heading = "Socket", value_name = "PATH")]
    socket_path: Option<PathBuf>,
    /// File mode of the socket, in octal
    #[arg(long, help_heading = "Socket", value_name = "MODE", default_value_t)]
    mode: SocketMode,
    /// Owner of the socket
    #[arg(long, help_heading = "Socket", value_name = "USER")]
    owner: Option<String>,
    /// Group of the socket
    #[arg(long, help_heading = "Socket", value_name = "GROUP")]
    group: Option<String>,
    /// Label shown with the VM; can be repeated
    #[arg(long, help_heading = "Placement", value_name = "KEY=VALUE", value_parser = values::label)]
    label: Vec<(String, String)>,
    /// Without --card: prefers the card of a VM with this label; can be repeated
    #[arg(long, help_heading = "Placement", value_name = "KEY[=VALUE]")]
    near: Vec<LabelMatch>,
    /// Never shares a card with a VM that has this label; can be repeated
    #[arg(long, help_heading = "Placement", value_name = "KEY[=VALUE]")]
    apart_from: Vec<LabelMatch>,
    /// Assigns the whole card to the VM without mediation; the card must not have other VMs
    #[arg(long)]
    passthrough: bool,
}

impl Add {
    /// Returns the request body. Omits options that were not given, so that a profile can set them.
    fn table(self) -> Result<Map<String, Value>, ClientError> {
        let time = self.time.patch();
        let mut table = table(&VmSpec::from(self)).map_err(ClientError::protocol)?;
        table.insert("time".to_owned(), time.into());
        Ok(table)
    }
}

impl From<Add> for VmSpec {
    fn from(add: Add) -> Self {
        let Add {
            name,
            card,
            profile,
            vram_mib,
            channels,
            hang_limit_ms,
            memory,
            time,
            paravirtual,
            share_group,
            cuda,
            cuda_window_mib,
            xen_domain,
            socket_path,
            mode,
            owner,
            group,
            label,
            near,
            apart_from,
            passthrough,
        } = add;
        Self {
            name,
            card,
            profile,
            vram_mib,
            channels,
            passthrough,
            apertures: Apertures::default(),
            shadow: shadow_pt::Mode::default(),
            hang_limit_ms,
            memory: memory.into(),
            time: time.share(),
            paravirtual: Paravirtual { offered: paravirtual, group: share_group, ..Paravirtual::default() },
            cuda: cuda.then(|| FunctionSpec {
                window_mib: cuda_window_mib.unwrap_or(FunctionSpec::default().window_mib),
                ..FunctionSpec::default()
            }),
            xen_domain,
            socket: socket_path,
            mode,
            owner,
            group,
            labels: label.into_iter().collect(),
            near,
            apart_from,
        }
    }
}

#[derive(Clone, Debug, Subcommand)]
enum CardCommand {
    /// Shows all cards, or one card in detail
    Show {
        /// Name of the card
        name: Option<String>,
        #[command(flatten)]
        watch: Watch,
    },
    /// Makes a card reject new virtual machines and tenants, and moves its virtual machines to other cards; exits with
    /// 0 if none is left, and with 4 otherwise
    Drain {
        /// Name of the card
        name: String,
    },
    /// Makes a card accept virtual machines and tenants again
    Undrain {
        /// Name of the card
        name: String,
    },
    /// Falcon firmware for real cards: available images and their approval by the operator
    #[command(subcommand)]
    Firmware(firmware::FirmwareCommand),
    #[command(flatten)]
    Host(host::HostCommand),
}

/// Runs the command line of this process, with colours on terminals.
pub fn main() -> ExitCode {
    let (mut out, mut err) = (io::stdout().lock(), io::stderr().lock());
    ExitCode::from(run_in_colours(std::env::args_os(), &mut out, &mut err, Colours::of_terminals()) as u8)
}

/// Runs one command without colours. `arguments` are the process's arguments, starting with the program name.
pub fn run<I, T>(arguments: I, out: &mut dyn Write, err: &mut dyn Write) -> Code
where
    I: IntoIterator<Item = T>,
    T: Into<std::ffi::OsString> + Clone,
{
    run_in_colours(arguments, out, err, Colours::default())
}

/// Like [`run`], with colours in tables and errors on the streams that `colours` selects.
fn run_in_colours<I, T>(arguments: I, out: &mut dyn Write, err: &mut dyn Write, colours: Colours) -> Code
where
    I: IntoIterator<Item = T>,
    T: Into<std::ffi::OsString> + Clone,
{
    let words: Vec<std::ffi::OsString> = arguments.into_iter().map(Into::into).collect();
    let arguments = match usage::parse(&words) {
        Ok(arguments) => arguments,
        Err(error) => return usage::show(&error, &words, out, err, colours),
    };
    let form = if arguments.json { Form::Json } else { arguments.output };
    // Formats other than tables are for programs, and are never coloured.
    let out: &mut dyn Write = &mut Painted::new(out, colours.out && form.is_table());
    let err: &mut dyn Write = &mut Painted::new(err, colours.err && form.is_table());
    let done = match (arguments.command.watch(), &arguments.command) {
        (Some(interval), _) => watch::run(interval, form, &arguments, out),
        (None, Command::Events(events)) if events.follows() => {
            Client::new(arguments.socket.clone()).and_then(|client| events.follow(&client, form, out))
        }
        _ => answer(form, arguments).map(|(text, code)| {
            let written = out.write_all(form.shown(&text).as_bytes()).and_then(|()| out.flush());
            if written.is_ok() { code } else { Code::Failed }
        }),
    };
    done.unwrap_or_else(|error| {
        let _ = match (form, error.to_api()) {
            (Form::Json, error) => writeln!(err, "{}", form.shown(json(&error).trim_end())),
            (Form::Yaml, error) => writeln!(err, "{}", form.shown(forms::yaml(&error).trim_end())),
            (Form::Table | Form::Wide | Form::Csv, error) => {
                let text = format!("mediatorctl: {}\n  {}", error.error, error.what_to_do);
                writeln!(err, "{}", form.shown(&text))
            }
        };
        error.exit_code()
    })
}

/// Runs a command, and returns its output and exit code.
fn answer(form: Form, arguments: Arguments) -> Result<(String, Code), ClientError> {
    let Arguments { socket, command, if_revision, .. } = arguments;
    let client = Client::new(socket.clone())?.expecting(if_revision);
    let text = match command {
        Command::Assert(assert) => return assert.run(&client, form),
        Command::Card(CardCommand::Drain { name }) => return moving::drain(client, form, &name),
        Command::Doctor(doctor) => return Ok(doctor.run(&client, &socket, form)),
        Command::Apply(apply) => apply.run(&client, form)?,
        Command::Export(export) => export.run(&client, form)?,
        Command::Events(events) => events.list(&client, form)?,
        Command::LibvirtHook(hook) => hook.run(&client, std::io::stdin())?,
        Command::Schema => json(&api::schema::document()),
        Command::Completion { shell } => shell.completion(),
        Command::Man { folder } => {
            pages::write(&folder).map_err(|source| ClientError::File { path: folder, source })?;
            String::new()
        }
        Command::Vm(VmCommand::List { .. }) => {
            let list: api::VmList = client.get("/v1/vms")?;
            form.render_wide(&list, |list, wide| output::vms(&list.vms, wide))
        }
        Command::Vm(VmCommand::Show { name, .. }) => {
            let vm: api::Vm = client.get(&format!("/v1/vms/{}", client::segment(&name)))?;
            form.render(&vm, output::vm)
        }
        Command::Vm(VmCommand::Add(add)) => {
            let vm: api::Vm = client.post("/v1/vms", &add.table()?)?;
            form.render(&vm, output::vm_added)
        }
        Command::Vm(VmCommand::Remove { name }) => {
            client.delete(&format!("/v1/vms/{}", client::segment(&name)))?;
            form.render(&serde_json::json!({ "removed": name }), |_| format!("VM {name} removed\n"))
        }
        Command::Vm(VmCommand::LaunchArgs { name, vmm: Some(Vmm::Libvirt), memory, profile: Some(profile) }) => {
            let args = libvirt::domain(&client, &socket, &name, &profile, &memory)?;
            form.render(&args, output::launch_args)
        }
        Command::Vm(VmCommand::LaunchArgs { profile: Some(_), .. }) => {
            return Err(ClientError::Desired {
                path: "--profile".into(),
                what: "--profile requires --vmm libvirt, whose hook creates the virtual machine".to_owned(),
            });
        }
        Command::Vm(VmCommand::LaunchArgs { name, vmm, memory, .. }) => {
            let vmm = vmm.map(|vmm| format!("&vmm={vmm}")).unwrap_or_default();
            let path = format!("/v1/vms/{}/launch-args?memory={}{vmm}", client::segment(&name), String::from(memory));
            let args: api::LaunchArgs = client.get(&path)?;
            form.render(&args, output::launch_args)
        }
        Command::Vm(VmCommand::Move { name, card }) => moving::move_vm(client, form, &name, card)?,
        Command::Vm(VmCommand::Save { name, file, force }) => saving::save(client, form, &name, &file, force)?,
        Command::Vm(VmCommand::Restore { name, file }) => saving::restore(client, form, &name, &file)?,
        Command::Vm(VmCommand::RestartWorkers { name, pid }) => {
            let (text, code) = moving::restart_workers(client, form, &name, pid)?;
            return Ok((text, code));
        }
        Command::Card(CardCommand::Undrain { name }) => moving::undrain(&client, form, &name)?,
        Command::Card(CardCommand::Host(command)) => command.run(&client, form)?,
        Command::Card(CardCommand::Firmware(command)) => command.run(form)?,
        Command::Card(CardCommand::Show { name: None, .. }) => {
            let list: api::CardList = client.get("/v1/cards")?;
            form.render_wide(&list, |list, wide| output::cards(&list.cards, wide))
        }
        Command::Card(CardCommand::Show { name: Some(name), .. }) => {
            let card: api::Card = client.get(&format!("/v1/cards/{}", client::segment(&name)))?;
            form.render(&card, output::card)
        }
        Command::Daemon(command) => command.run(&client, form)?,
        Command::Sched(command) => sched::answer(&client, form, command)?,
        Command::Memory(command) => memory::answer(&client, form, command)?,
        Command::Tenant(command) => tenant::answer(client, form, command)?,
        Command::Profile(command) => profile::answer(&client, form, command)?,
        Command::Run(run) => run.run(&client)?,
        Command::Top(top) => top.run(&client, form)?,
    };
    Ok((text, Code::Good))
}

impl ClientError {
    fn exit_code(&self) -> Code {
        match self {
            Self::Ask(AskError::Unreachable { .. } | AskError::Forbidden { .. }) => Code::Unreachable,
            Self::Ask(AskError::Refused(error)) => match error.code {
                ErrorCode::Invalid => Code::Usage,
                ErrorCode::NotFound => Code::NotFound,
                ErrorCode::Conflict | ErrorCode::Quota => Code::Conflict,
                ErrorCode::Forbidden => Code::Unreachable,
                ErrorCode::Failed => Code::Failed,
            },
            Self::Exists { .. } => Code::Conflict,
            Self::Report(_) | Self::Record { .. } | Self::Desired { .. } => Code::Usage,
            Self::Runtime(_)
            | Self::NotServed { .. }
            | Self::Ask(AskError::Protocol(_) | AskError::TimedOut(_))
            | Self::Differs { .. }
            | Self::File { .. }
            | Self::Unreadable { .. }
            | Self::Terminal(_) => Code::Failed,
        }
    }

    fn to_api(&self) -> api::Error {
        let what_to_do = match self {
            Self::Ask(AskError::Refused(error)) => return error.clone(),
            Self::Ask(AskError::Unreachable { .. }) => "start mediatord, or pass its admin socket with --socket PATH",
            Self::Ask(AskError::Forbidden { .. }) => {
                "join the socket's group: `admin_group` with `admin_mode`, or `read_group` for read-only access, \
                 in the daemon's configuration"
            }
            Self::Ask(AskError::Protocol(_)) => {
                "check that --socket is the admin socket of a mediatord of the same version"
            }
            Self::Ask(AskError::TimedOut(_)) => "see the daemon's log",
            Self::Runtime(_) => "free resources on the host, and try again",
            Self::Record { .. } => "pass a file written by `mediatorctl sched record`",
            Self::Differs { .. } => "replay it with the recording version to see the difference",
            Self::File { .. } => "choose another file or folder",
            Self::Unreadable { .. } => "pass a readable file written by `mediatorctl vm save`",
            Self::Exists { .. } => "nothing was saved",
            Self::Desired { .. } => "pass a file in the format of `mediatorctl export`",
            Self::NotServed { .. } => {
                "check with `nvidia-smi` that the driver works, and see `mediatorctl card show` and the daemon's log"
            }
            Self::Report(_) => "choose another --since or --window",
            Self::Terminal(_) => "use --once, which prints the table",
        };
        let mut text = self.to_string();
        if let Some(source) = std::error::Error::source(self) {
            text = format!("{text}: {source}");
        }
        let code = match self.exit_code() {
            Code::Usage => ErrorCode::Invalid,
            Code::Conflict => ErrorCode::Conflict,
            _ => ErrorCode::Failed,
        };
        api::Error { code, error: text, what_to_do: what_to_do.to_owned() }
    }
}
