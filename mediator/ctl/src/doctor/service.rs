//! Checks the daemon: its configuration, service, sockets and cards.

use config::ConfigError;

use super::{Finding, Patient, host::Host};
use crate::client::ClientError;
use admin_client::AskError;

/// Name of the daemon's systemd service.
const UNIT: &str = "gpu-mediator.service";
/// Maximum number of configuration error lines to report.
const LINES: usize = 5;

pub(super) fn configuration(patient: &Patient<'_>) -> Vec<Finding> {
    let path = patient.path.display();
    let finding = match &patient.config {
        Ok(config) if config.cards.is_empty() => Finding::missing(
            "config",
            format!("{path} has no [[card]] table"),
            "add a card: see docs/guides/operating.md for the first steps, and docs/reference/configuration.md for all keys",
        ),
        Ok(config) => {
            let (cards, vms, tenants) = (config.cards.len(), config.vms.len(), config.tenants.len());
            Finding::good("config", format!("{path}: {cards} cards, {vms} VMs, {tenants} tenants"))
        }
        Err(ConfigError::Read { source, .. }) => Finding::missing(
            "config",
            format!("{path} cannot be read: {source}"),
            "create it (docs/reference/configuration.md), or pass its path with --config",
        ),
        Err(ConfigError::Mistakes(lines)) => {
            let more = lines.len().saturating_sub(LINES);
            let mut shown = lines[..lines.len().min(LINES)].join("\n  ");
            if more > 0 {
                shown.push_str(&format!("\n  and {more} more"));
            }
            Finding::missing("config", format!("{path} has {} errors", lines.len()), shown)
        }
    };
    vec![finding]
}

pub(super) fn look(patient: &Patient<'_>) -> Vec<Finding> {
    let mut findings: Vec<_> = unit(patient).into_iter().collect();
    findings.extend(folders(patient));
    findings.extend(daemon(patient));
    findings
}

/// Returns the daemon's process ID.
pub(super) fn process(host: &Host) -> Option<u32> {
    let mut pids = host.names("proc").into_iter().filter_map(|name| name.parse::<u32>().ok());
    pids.find(|pid| host.read(format!("proc/{pid}/comm")).is_some_and(|name| name.trim() == "mediatord"))
}

/// Checks the state of the daemon's systemd service.
fn unit(patient: &Patient<'_>) -> Option<Finding> {
    let host = &patient.host;
    if !host.has("run/systemd/system") {
        return None;
    }
    let program = host.program("systemctl")?;
    let text = host.program_output(
        &program,
        &["show", UNIT, "--property=LoadState,ActiveState,SubState,UnitFileState,NRestarts"],
    )?;
    let property = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        line.unwrap_or_default().to_owned()
    };
    let (active, enabled) = (property("ActiveState"), property("UnitFileState"));
    Some(match (property("LoadState").as_str(), active.as_str()) {
        ("loaded", "active") if enabled == "enabled" => {
            Finding::good("service", format!("{UNIT} is running, with {} automatic restarts", property("NRestarts")))
        }
        ("loaded", "active") => Finding::note(
            "service",
            format!("{UNIT} is running, but is not enabled at boot"),
            "run `systemctl enable gpu-mediator`",
        ),
        ("loaded", _) => Finding::missing(
            "service",
            format!("{UNIT} is {active} ({})", property("SubState")),
            "run `systemctl start gpu-mediator`; `journalctl --unit=gpu-mediator` shows why it exited",
        ),
        _ => Finding::note(
            "service",
            format!("{UNIT} is not installed"),
            "install the package gpu-mediator, or start mediatord by other means",
        ),
    })
}

/// Checks that the socket folder exists.
fn folders(patient: &Patient<'_>) -> Option<Finding> {
    let config = patient.config.as_ref().ok()?;
    let folder = &config.daemon.socket_dir;
    // The service creates its own folder at startup.
    if patient.host.has(folder) || folder.starts_with("/run/gpu-mediator") {
        return None;
    }
    let found = format!("the folder {} does not exist", folder.display());
    Some(Finding::missing("sockets", found, "create the folder in `socket_dir`, writable for the daemon's user"))
}

/// Checks whether the daemon responds, and the state that it reports.
fn daemon(patient: &Patient<'_>) -> Vec<Finding> {
    let socket = patient.socket.display();
    let cards = match patient.client.get::<api::CardList>("/v1/cards") {
        Ok(list) => list.cards,
        Err(ClientError::Ask(AskError::Forbidden { .. })) => {
            return vec![Finding::note(
                "daemon",
                format!("this user has no access to {socket}"),
                "run this as root, or join the socket's group (`admin_group`, `read_group`)",
            )];
        }
        Err(error) => {
            let found = match process(&patient.host) {
                Some(pid) => format!("mediatord is running (process {pid}), but does not serve {socket}: {error}"),
                None => format!("no daemon responds at {socket}"),
            };
            return vec![Finding::missing("daemon", found, "start it, or pass its admin socket with --socket")];
        }
    };
    let vms = patient.client.get::<api::VmList>("/v1/vms").map(|list| list.vms).unwrap_or_default();
    let mut findings =
        vec![Finding::good("daemon", format!("{socket} responds: {} cards, {} VMs", cards.len(), vms.len()))];
    for card in &cards {
        if let Some(error) = &card.error {
            let found = format!("card `{}` is out of service: {error}", card.name);
            findings.push(Finding::missing(
                "card",
                found,
                "see the daemon's log; run `systemctl restart gpu-mediator` after the repair",
            ));
        }
        if !card.strangers.is_empty() {
            let found = format!("{1} processes use card `{0}` outside the daemon", card.name, card.strangers.len());
            findings.push(Finding::note(
                "card",
                found,
                "`mediatorctl card show` lists them; start them with `mediatorctl run`",
            ));
        }
    }
    let tenants = patient.client.get::<api::TenantList>("/v1/tenants").map(|list| list.tenants).unwrap_or_default();
    for tenant in tenants.iter().filter(|tenant| tenant.over_quota_bytes > 0) {
        let found = format!(
            "tenant `{}` uses {} MiB of card `{}` beyond its limit, outside its accounted memory",
            tenant.name,
            tenant.over_quota_bytes >> 20,
            tenant.card
        );
        findings.push(Finding::note(
            "tenant",
            found,
            "`mediatorctl tenant show` lists the processes; `cuda.strangers = \"kill\"` makes the owner kill such processes",
        ));
    }
    for vm in &vms {
        if let Some(error) = &vm.error {
            findings.push(Finding::missing(
                "vm",
                format!("VM `{}` has failed: {error}", vm.name),
                "remove it and add it again",
            ));
        }
        if vm.memory_not_shared {
            let what = format!("start the VMM with the arguments that `mediatorctl vm launch-args {}` prints", vm.name);
            findings.push(Finding::missing(
                "vm",
                format!("VM `{}`: its VMM does not share guest memory", vm.name),
                what,
            ));
        }
    }
    findings
}
