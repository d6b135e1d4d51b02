//! Tenants of CUDA cards: adds, removes, lists and changes them, and starts programs as tenants.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use sched::groups::Sharing;
use serde_json::{Map, Value};

use api::{Tenant, TenantPatch, Unaccounted};
use config::patch::table;
use config::{OnRemove, OnStuck, Placement, SocketMode, TenantCards, TenantSpec, VmMemory};

use super::cdi;
use super::client::{self, Client, ClientError};
use super::memory::MemoryFlags;
use super::moving;
use super::output::{self, NOTHING, heads};
use super::sched::TimeFlags;
use super::values::named;
use super::watch::Watch;
use super::{Form, values};

mod run;

pub(super) use run::Run;

#[derive(Clone, Debug, Subcommand)]
pub(super) enum TenantCommand {
    /// Adds a tenant; its socket exists when the command returns
    Add(Box<Add>),
    /// Removes a tenant, ends its programs according to its policy, and frees their memory on the card
    Remove {
        /// Name of the tenant
        name: String,
    },
    /// Lists the tenants
    List {
        #[command(flatten)]
        watch: Watch,
    },
    /// Shows one tenant in detail
    Show {
        /// Name of the tenant
        name: String,
        #[command(flatten)]
        watch: Watch,
    },
    /// Prints or writes the CDI file through which container runtimes give containers access to the tenant
    Cdi(cdi::Cdi),
    /// Changes a tenant's share of its card, with immediate effect even while its programs run
    Set(Box<Set>),
    /// Moves a tenant to another card of the same model, also while its programs run
    Move {
        /// Name of the tenant
        name: String,
        /// Target card; by default, the suitable card with the most free memory
        #[arg(long, value_name = "NAME")]
        card: Option<String>,
    },
}

#[derive(Clone, Debug, Args)]
pub(super) struct Add {
    /// Name of the tenant
    name: String,
    /// CUDA card of the tenant; by default, the daemon chooses one
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    card: String,
    /// Cards of a tenant with several cards, separated by commas, or the number of cards to choose
    #[arg(long, value_name = "NAME,NAME|NUMBER", conflicts_with = "card")]
    cards: Option<TenantCards>,
    /// Policy that chooses cards that are not named: room, pack, spread or nvlink; by default, the daemon's policy
    #[arg(long, value_name = "POLICY", value_parser = named::<Placement>)]
    placement: Option<Placement>,
    /// Profile that provides the values of omitted options
    #[arg(long, value_name = "NAME")]
    profile: Option<String>,
    /// Memory size that the tenant's programs see, such as 20G
    #[arg(long, value_name = "SIZE", value_parser = values::mib, required_unless_present = "profile")]
    vram_mib: Option<u64>,
    #[command(flatten)]
    memory: MemoryFlags,
    #[command(flatten)]
    time: TimeFlags,
    #[command(flatten)]
    group_sharing: GroupSharing,
    #[command(flatten)]
    policies: Policies,
    /// Path of the socket, or with several cards of the sockets' folder; by default, in tenants/NAME in the daemon's
    /// socket folder
    #[arg(long, help_heading = "Socket", value_name = "PATH")]
    socket_path: Option<PathBuf>,
    /// File mode of the socket, in octal; users that can connect act as the tenant
    #[arg(long, help_heading = "Socket", value_name = "MODE", default_value_t)]
    mode: SocketMode,
    /// Owner of the socket
    #[arg(long, help_heading = "Socket", value_name = "USER")]
    owner: Option<String>,
    /// Group of the socket
    #[arg(long, help_heading = "Socket", value_name = "GROUP")]
    group: Option<String>,
    /// Label shown with the tenant; can be repeated
    #[arg(long, value_name = "KEY=VALUE", value_parser = values::label)]
    label: Vec<(String, String)>,
}

impl Add {
    /// Returns the request body. Omits options that are not given, so that a profile can set them.
    fn table(self) -> Result<Map<String, Value>, ClientError> {
        let (time, vram, sharing) = (self.time.patch(), self.vram_mib, self.group_sharing.sharing);
        let mut table = table(&TenantSpec::from(self)).map_err(ClientError::protocol)?;
        table.insert("time".to_owned(), time.into());
        if vram.is_none() {
            table.remove("vram_mib");
        }
        if sharing.is_none() {
            table.remove("sharing");
        }
        Ok(table)
    }
}

impl From<Add> for TenantSpec {
    fn from(add: Add) -> Self {
        let Add {
            name,
            card,
            cards,
            placement,
            profile,
            vram_mib,
            memory,
            time,
            group_sharing,
            policies,
            socket_path,
            mode,
            owner,
            group,
            label,
        } = add;
        Self {
            name,
            card,
            cards: cards.unwrap_or_default(),
            placement,
            profile,
            vram_mib: vram_mib.unwrap_or_default(),
            memory: memory.into(),
            time: time.share(),
            share_group: group_sharing.share_group.unwrap_or_default(),
            sharing: group_sharing.sharing.unwrap_or_default(),
            on_stuck: policies.on_stuck.unwrap_or_default(),
            on_remove: policies.on_remove.unwrap_or_default(),
            socket: socket_path,
            mode,
            owner,
            group,
            labels: label.into_iter().collect(),
        }
    }
}

/// Share group of the tenant.
#[derive(Clone, Debug, Args)]
struct GroupSharing {
    /// Group of tenants whose programs may use the card simultaneously; an empty name means no group
    #[arg(long, value_name = "GROUP")]
    share_group: Option<String>,
    /// Sharing mode of the group: turns, together or auto; the strictest member's setting applies
    #[arg(long, value_name = "MODE", value_parser = named::<Sharing>)]
    sharing: Option<Sharing>,
}

/// Policies for the tenant's programs.
#[derive(Clone, Debug, Args)]
struct Policies {
    /// Policy for a program that occupies the card and does not respond: kill or suspend
    #[arg(long, value_name = "POLICY", value_parser = named::<OnStuck>)]
    on_stuck: Option<OnStuck>,
    /// Policy for the tenant's programs when it is removed: kill or disconnect
    #[arg(long, value_name = "POLICY", value_parser = named::<OnRemove>)]
    on_remove: Option<OnRemove>,
}

#[derive(Clone, Debug, Args)]
pub(super) struct Set {
    /// Name of the tenant
    name: String,
    /// Memory size that the tenant's programs see, such as 20G; programs keep memory that exceeds a lower size
    #[arg(long, value_name = "SIZE", value_parser = values::mib)]
    vram_mib: Option<u64>,
    #[command(flatten)]
    memory: MemoryFlags,
    #[command(flatten)]
    time: TimeFlags,
    #[command(flatten)]
    group_sharing: GroupSharing,
    #[command(flatten)]
    policies: Policies,
}

fn path(name: &str) -> String {
    format!("/v1/tenants/{}", client::segment(name))
}

pub(super) fn answer(client: Client, form: Form, command: TenantCommand) -> Result<String, ClientError> {
    match command {
        TenantCommand::Add(add) => {
            let tenant: Tenant = client.post("/v1/tenants", &add.table()?)?;
            Ok(form.render(&tenant, show))
        }
        TenantCommand::Remove { name } => {
            client.delete(&path(&name))?;
            Ok(form.render(&serde_json::json!({ "removed": name }), |_| format!("tenant {name} removed\n")))
        }
        TenantCommand::List { .. } => {
            let list: api::TenantList = client.get("/v1/tenants")?;
            Ok(form.render_wide(&list, |list, wide| tenants(&list.tenants, wide)))
        }
        TenantCommand::Show { name, .. } => {
            let tenant: Tenant = client.get(&path(&name))?;
            Ok(form.render(&tenant, show))
        }
        TenantCommand::Cdi(cdi) => cdi.run(&client, form),
        TenantCommand::Move { name, card } => moving::move_tenant(client, form, &name, card),
        TenantCommand::Set(set) => {
            let Set { name, vram_mib, memory, time, group_sharing, policies } = *set;
            let Policies { on_stuck, on_remove } = policies;
            let GroupSharing { share_group, sharing } = group_sharing;
            let memory = table(&VmMemory::from(memory)).map_err(ClientError::protocol)?;
            let time = time.patch();
            let patch = TenantPatch { vram_mib, memory, time, share_group, sharing, on_stuck, on_remove };
            let tenant: Tenant = client.patch(&path(&name), &patch)?;
            Ok(form.render(&tenant, show))
        }
    }
}

fn mib(bytes: u64) -> String {
    (bytes >> 20).to_string()
}

fn percent(permille: u32) -> String {
    format!("{}.{}%", permille / 10, permille % 10)
}

fn tenants(tenants: &[Tenant], wide: bool) -> String {
    if tenants.is_empty() {
        return "no tenants\n".to_owned();
    }
    let names = ["NAME", "CARD", "PROGRAMS", "MIB", "ON CARD", "IN HOST", "ENTITLED", "RECEIVED", "SOCKET"];
    let more = ["WEIGHT", "GUARANTEE MIB", "QUOTA MIB", "STATE", "WAITS FOR", "KILLED", "PROFILE"];
    let names = names.into_iter().chain(more.into_iter().filter(|_| wide));
    let mut rows = vec![heads(&names.collect::<Vec<_>>())];
    rows.extend(tenants.iter().map(|tenant| {
        let programs = if tenant.served { tenant.programs.len().to_string() } else { "NOT SERVED".to_owned() };
        let mut row = vec![
            tenant.name.clone(),
            tenant.all_cards(),
            programs,
            tenant.vram_mib.to_string(),
            mib(tenant.on_card_bytes),
            mib(tenant.in_host_bytes),
            percent(tenant.entitled_permille),
            percent(tenant.received_permille),
            tenant.socket.display().to_string(),
        ];
        let absent = || NOTHING.to_owned();
        let or_absent = |mib: Option<u64>| mib.map_or_else(absent, |mib| mib.to_string());
        let more = [
            tenant.time.weight.to_string(),
            or_absent(tenant.memory.guarantee_mib),
            or_absent(tenant.memory.quota_mib),
            tenant.state.name().to_owned(),
            tenant.waits_for.clone().unwrap_or_else(absent),
            tenant.killed.to_string(),
            tenant.profile.clone().unwrap_or_else(absent),
        ];
        row.extend(more.into_iter().filter(|_| wide));
        row
    }));
    let numbers: &[usize] = if wide { &[2, 3, 4, 5, 6, 7, 9, 10, 11, 14] } else { &[2, 3, 4, 5, 6, 7] };
    output::table(rows, numbers)
}

/// Describes a program by its name and process ID. For a worker, describes its guest program, with both process IDs.
fn program(api::Program { pid, name, guest }: &api::Program) -> String {
    let Some(guest) = guest else { return format!("{name} ({pid})") };
    let name = if guest.name.is_empty() { name } else { &guest.name };
    match guest.pid {
        Some(guest) => format!("{name} ({guest} in the guest, worker {pid})"),
        None => format!("{name} (in the guest, worker {pid})"),
    }
}

fn programs(programs: &[api::Program]) -> String {
    let shown: Vec<_> = programs.iter().map(program).collect();
    if shown.is_empty() { NOTHING.to_owned() } else { shown.join(" ") }
}

fn show(tenant: &Tenant) -> String {
    let quota = tenant.memory.quota_mib.map_or_else(|| NOTHING.to_owned(), |mib| format!("{mib} MiB"));
    let guarantee = tenant.memory.guarantee_mib.map_or_else(|| NOTHING.to_owned(), |mib| format!("{mib} MiB"));
    let rows = [
        ("name", tenant.name.clone()),
        ("card", tenant.all_cards()),
        ("profile", tenant.profile.clone().unwrap_or_else(|| NOTHING.to_owned())),
        ("served", if tenant.served { "yes" } else { "NO" }.to_owned()),
        ("socket", tenant.socket.display().to_string()),
        ("programs", programs(&tenant.programs)),
        ("memory", format!("{} MiB", tenant.vram_mib)),
        ("  on the card", format!("{} MiB", mib(tenant.on_card_bytes))),
        ("  in host memory", format!("{} MiB", mib(tenant.in_host_bytes))),
        ("  quota", quota),
        ("  guarantee", guarantee),
        ("share group", tenant.sharing_in_words().unwrap_or_else(|| NOTHING.to_owned())),
        ("weight", tenant.time.weight.to_string()),
        ("entitled", percent(tenant.entitled_permille)),
        ("received", percent(tenant.received_permille)),
        ("time", format!("{} ms", tenant.used_ns / 1_000_000)),
        ("state", tenant.state.name().to_owned()),
        ("  waits for", tenant.waits_for.clone().unwrap_or_else(|| "-".to_owned())),
        ("wait for turns, p99", format!("{} us", tenant.wait_p99_ns / 1000)),
        ("wait for memory quanta", format!("{} ms", tenant.quantum_wait_ns / 1_000_000)),
        ("outside its account", past(tenant)),
        ("programs killed", tenant.killed.to_string()),
        ("programs not killed", tenant.kill_failures.to_string()),
        ("programs suspended", tenant.suspended.to_string()),
        (
            "strikes",
            if tenant.quarantined { format!("{}, QUARANTINED", tenant.strikes) } else { tenant.strikes.to_string() },
        ),
    ];
    let labels = tenant.labels.iter().map(|(key, value)| vec![format!("label {key}"), value.to_owned()]);
    let cards = tenant.cards_in_words().map(|(card, words)| vec![format!("on {card}"), words]);
    let rows = rows.into_iter().map(|(name, value)| vec![name.to_owned(), value]);
    output::table(rows.chain(cards).chain(labels).collect(), &[])
}

/// Describes a tenant's memory that is unaccounted, freed but still in use, or over its quota.
fn past(tenant: &Tenant) -> String {
    let one = |one: &Unaccounted| format!("{} ({}): {} MiB", one.program, one.pid, mib(one.bytes));
    let mut parts: Vec<String> = tenant.unaccounted.iter().map(one).collect();
    for (bytes, what) in [(tenant.kept_bytes, "kept"), (tenant.over_quota_bytes, "OVER QUOTA")] {
        if bytes > 0 {
            parts.push(format!("{} MiB {what}", mib(bytes)));
        }
    }
    if parts.is_empty() { NOTHING.to_owned() } else { parts.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Program names are untrusted, so they are escaped.
    #[test]
    fn names_of_programs_are_no_commands_to_the_terminal() {
        let name = "x\u{1b}[2J\nfake\u{9b}".to_owned();
        let guest = api::ServedProgram { name: name.clone(), pid: Some(9) };
        let in_guest = api::Program { pid: 8, name: "cuda-worker".to_owned(), guest: Some(guest) };
        let names = programs(&[api::Program { pid: 7, name, guest: None }, in_guest]);
        let shown = output::table(vec![vec!["programs".to_owned(), names]], &[]);
        assert!(shown.contains("x\\u{1b}[2J\\u{a}fake\\u{9b} (7)"), "{shown}");
        assert!(!shown.chars().any(|c| c.is_control() && c != '\n') && shown.lines().count() == 1, "{shown:?}");
    }
}
