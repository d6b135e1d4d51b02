//! Moving virtual machines and tenants between cards, and draining cards.

use std::fmt::Write;
use std::time::Duration;

use super::client::{self, Client, ClientError};
use super::progress::Progress;
use super::{Code, Form, output};
use api::{DrainReport, MoveTo, Moved, RestartWorkers, TenantMoved, WorkerRestart, WorkerRestarts};

/// Time limit for moves.
// TIMEOUT: moving 64 virtual machines with several GiB each through the host takes minutes.
const MOVE_TIMEOUT: Duration = Duration::from_secs(3600);

/// Moves a virtual machine and returns the output.
pub(super) fn move_vm(client: Client, form: Form, name: &str, card: Option<String>) -> Result<String, ClientError> {
    let path = format!("/v1/vms/{}/move", client::segment(name));
    let _progress = Progress::of_command(form, format!("moving VM {name}"));
    let done: Moved = client.waiting(MOVE_TIMEOUT).post(&path, &MoveTo { card })?;
    Ok(form.render(&done, moved))
}

/// Moves a tenant and returns the output.
pub(super) fn move_tenant(client: Client, form: Form, name: &str, card: Option<String>) -> Result<String, ClientError> {
    let path = format!("/v1/tenants/{}/move", client::segment(name));
    let _progress = Progress::of_command(form, format!("moving tenant {name}"));
    let done: TenantMoved = client.waiting(MOVE_TIMEOUT).post(&path, &MoveTo { card })?;
    Ok(form.render(&done, tenant_moved))
}

/// Restarts a virtual machine's workers. Returns the output, and an exit code that indicates whether all programs
/// continue in new workers.
pub(super) fn restart_workers(
    client: Client,
    form: Form,
    name: &str,
    pid: Option<u32>,
) -> Result<(String, Code), ClientError> {
    let path = format!("/v1/vms/{}/workers/restart", client::segment(name));
    let _progress = Progress::of_command(form, format!("restarting workers of VM {name}"));
    let done: WorkerRestarts = client.waiting(MOVE_TIMEOUT).post(&path, &RestartWorkers { pid })?;
    let code = if done.programs.iter().all(|program| program.why.is_none()) { Code::Good } else { Code::Conflict };
    Ok((form.render(&done, restarted), code))
}

fn restarted(done: &WorkerRestarts) -> String {
    if done.programs.is_empty() {
        return format!("no programs of VM {} use CUDA\n", done.vm);
    }
    let mut rows = vec![output::heads(&["PROGRAM", "PID", "PAUSE MS", "WHY NOT"])];
    rows.extend(done.programs.iter().map(|program| {
        let WorkerRestart { name, pid, pause_ms, why } = program;
        let number = |number: Option<u64>| number.map_or_else(|| "-".to_owned(), |number| number.to_string());
        vec![name.clone(), number(pid.map(u64::from)), number(*pause_ms), why.clone().unwrap_or_default()]
    }));
    output::table(rows, &[1, 2])
}

/// Drains a card. Returns the output, and an exit code that indicates whether VMs or tenants remain.
pub(super) fn drain(client: Client, form: Form, name: &str) -> Result<(String, Code), ClientError> {
    let path = format!("/v1/cards/{}/drain", client::segment(name));
    let _progress = Progress::of_command(form, format!("moving the VMs and tenants of card {name}"));
    let done: DrainReport = client.waiting(MOVE_TIMEOUT).post(&path, &())?;
    let code = if done.left.is_empty() { Code::Good } else { Code::Conflict };
    Ok((form.render(&done, report), code))
}

/// Ends a drain and returns the output.
pub(super) fn undrain(client: &Client, form: Form, name: &str) -> Result<String, ClientError> {
    let card: api::Card = client.post(&format!("/v1/cards/{}/undrain", client::segment(name)), &())?;
    Ok(form.render(&card, |card| format!("card {} accepts VMs and tenants again\n", card.name)))
}

fn moved(moved: &Moved) -> String {
    let Moved { vm, from, to, pause_ms, pause: _, memory_mib, total_ms } = moved;
    format!("VM {vm} has moved from {from} to {to}: {memory_mib} MiB in {total_ms} ms, paused for {pause_ms} ms\n")
}

fn tenant_moved(moved: &TenantMoved) -> String {
    let TenantMoved { tenant, from, to, programs, pause_ms, memory_mib, total_ms } = moved;
    format!(
        "tenant {tenant} has moved from {from} to {to}: {programs} programs with {memory_mib} MiB in {total_ms} ms, \
         paused for {pause_ms} ms\n"
    )
}

fn report(report: &DrainReport) -> String {
    let DrainReport { card, moved, tenants, left } = report;
    let mut text = format!("card {card} accepts no new VMs and tenants\n");
    if !moved.is_empty() || !tenants.is_empty() {
        let mut rows = vec![output::heads(&["MOVED", "TO", "MIB", "PAUSE MS", "TOTAL MS"])];
        rows.extend(moved.iter().map(|one| {
            let Moved { vm, to, pause_ms, memory_mib, total_ms, .. } = one;
            vec![vm.clone(), to.clone(), memory_mib.to_string(), pause_ms.to_string(), total_ms.to_string()]
        }));
        rows.extend(tenants.iter().map(|one| {
            let TenantMoved { tenant, to, pause_ms, memory_mib, total_ms, .. } = one;
            vec![tenant.clone(), to.clone(), memory_mib.to_string(), pause_ms.to_string(), total_ms.to_string()]
        }));
        // Writing to a string cannot fail.
        let _ = write!(text, "\n{}", output::table(rows, &[2, 3, 4]));
    }
    if left.is_empty() {
        text.push_str("\nno VMs or tenants are left on it\n");
    } else {
        let mut rows = vec![output::heads(&["LEFT", "WHY"])];
        rows.extend(left.iter().map(|one| vec![one.vm.clone(), one.why.clone()]));
        let _ = write!(text, "\n{}", output::table(rows, &[]));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn move_report_lists_moved_vms_and_remaining_vms_with_reason() {
        let one = |vm: &str, to: &str| Moved {
            vm: vm.to_owned(),
            from: "card0".to_owned(),
            to: to.to_owned(),
            pause_ms: 31,
            pause: api::PauseParts::default(),
            memory_mib: 512,
            total_ms: 840,
        };
        assert_eq!(
            moved(&one("web", "card1")),
            "VM web has moved from card0 to card1: 512 MiB in 840 ms, paused for 31 ms\n"
        );
        let left = vec![api::Left { vm: "wired".to_owned(), why: "it uses its card in passthrough".to_owned() }];
        let mut all =
            DrainReport { card: "card0".to_owned(), moved: vec![one("web", "card1")], tenants: Vec::new(), left };
        assert_eq!(
            report(&all),
            "card card0 accepts no new VMs and tenants\n\n\
             MOVED  TO     MIB  PAUSE MS  TOTAL MS\nweb    card1  512        31       840\n\n\
             LEFT   WHY\nwired  it uses its card in passthrough\n"
        );
        (all.moved, all.left) = (Vec::new(), Vec::new());
        assert_eq!(report(&all), "card card0 accepts no new VMs and tenants\n\nno VMs or tenants are left on it\n");
    }
}
