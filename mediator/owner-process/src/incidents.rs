//! Reports an owner's actions on tenants and their programs, in the log and as events.

use api::EventKind;
use cuda_control::{Action, GivenUp, Incident};
use events::{Log, NewEvent};

/// Advice about a program that could not be killed.
const KILL_FAILED: &str = "a program could not be killed: it continues without turns and memory; kill \
    it manually, and make sure that the unit grants CAP_KILL";

/// Logs the actions, and adds them to the event log.
pub(super) fn report(card: &str, incidents: Vec<Incident>, events: &Log) {
    for Incident { tenant, action } in incidents {
        let (kind, text) = described(&tenant, &action);
        match kind {
            EventKind::KillFailed => tracing::error!(card, tenant, "{text}"),
            _ => tracing::warn!(card, tenant, "{text}"),
        }
        events.add(match action {
            Action::Forgotten(_) | Action::ServerEnded { .. } | Action::ServerStarted => {
                NewEvent::card(kind, card, text)
            }
            _ => NewEvent::tenant(kind, &tenant, text).on(card),
        });
    }
}

/// Returns the event kind and the text for an action.
fn described(tenant: &str, action: &Action) -> (EventKind, String) {
    match action {
        Action::Killed(program) => (EventKind::Killed, format!("a program was killed: {}", named(program))),
        Action::KillFailed(program) => (EventKind::KillFailed, format!("{KILL_FAILED}: {}", named(program))),
        Action::Suspended(program) => (EventKind::Suspended, format!("a program was suspended: {}", named(program))),
        Action::Struck(strikes) => (EventKind::Overran, format!("a turn exceeded its time limit, strike {strikes}")),
        Action::Quarantined => {
            let release = format!("run `mediatorctl sched release {tenant}` to release it");
            (EventKind::Quarantined, format!("quarantined: none of its work is started; {release}"))
        }
        Action::ServerEnded { why, programs } => {
            let programs: Vec<String> = programs.iter().map(|one| format!("`{}` ({})", one.program, one.pid)).collect();
            let programs = if programs.is_empty() { "none".to_owned() } else { programs.join(", ") };
            let text = format!("share group `{tenant}`: {why}; programs that have lost their work: {programs}");
            (EventKind::MpsLost, text)
        }
        Action::ServerStarted => {
            (EventKind::MpsStarted, format!("share group `{tenant}`: the MPS control daemon was restarted"))
        }
        Action::Forgotten(number) => {
            (EventKind::Suppressed, format!("{number} earlier actions on tenants are not listed"))
        }
    }
}

fn named(GivenUp { pid, program, why }: &GivenUp) -> String {
    format!("program `{program}`, process {pid}: {why}")
}
