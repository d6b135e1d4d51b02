//! The page that shows processes: programs of tenants and guests, and VMMs.

use super::Look;
use super::columns::{Column, Kind};
use super::view::{Cell, Line, Tone};
use crate::output::NOTHING;
use crate::output::memory::mib;
use api::{Client, GuestProgram, Tenant, Vm};

/// Columns of the page. A guest program has a process ID in the guest; its worker has one on the host.
pub(super) const TABLE: [Column; 7] = [
    Column { head: "CARD", kind: Kind::Text, rank: 5 },
    Column { head: "VM", kind: Kind::Text, rank: 1 },
    Column { head: "PROCESS", kind: Kind::Text, rank: 0 },
    Column { head: "PID", kind: Kind::Number, rank: 2 },
    Column { head: "GUEST PID", kind: Kind::Number, rank: 3 },
    Column { head: "WINDOW", kind: Kind::Number, rank: 6 },
    Column { head: "STATE", kind: Kind::Text, rank: 4 },
];

/// Returns one line for each process.
pub(super) fn lines(look: &Look) -> Vec<Line> {
    let of_tenants = look.tenants.iter().flat_map(|tenant| of_tenant(tenant, vm_of(look, &tenant.name)));
    let tenant_of = |name: &str| look.tenants.iter().find(|tenant| tenant.name == name);
    of_tenants.chain(look.vms.iter().flat_map(|vm| of_vm(vm, tenant_of(&vm.name)))).collect()
}

fn vm_of<'a>(look: &'a Look, name: &str) -> Option<&'a Vm> {
    look.vms.iter().find(|vm| vm.name == name)
}

/// Returns the processes of a tenant or VM as one line of text; `None` if it has no processes.
pub(super) fn in_words(look: &Look, card: &str, name: &str) -> Option<String> {
    // A tenant with several cards has one line for each process, with all cards.
    let of_it = |line: &Line| line.cells[0].text.split(',').any(|one| one == card) && line.cells[1].text == name;
    let word = |line: Line| {
        let [_, _, process, pid, guest_pid, ..] = &line.cells[..] else { return String::new() };
        match (pid.amount, guest_pid.amount) {
            (Some(pid), Some(guest)) => format!("{} ({guest} in the guest, worker {pid})", process.text),
            (Some(pid), None) => format!("{} ({pid})", process.text),
            (None, Some(pid)) => format!("{} ({pid} in the guest)", process.text),
            (None, None) => process.text.clone(),
        }
    };
    let words: Vec<String> = lines(look).into_iter().filter(of_it).map(word).collect();
    (!words.is_empty()).then(|| words.join(", "))
}

/// Describes the unaccounted card memory of a process, if any.
fn unaccounted(tenant: &Tenant, pid: u32) -> Option<String> {
    let found = tenant.unaccounted.iter().find(|one| one.pid == pid);
    found.map(|one| format!("{} UNACCOUNTED", mib(one.bytes)))
}

/// Returns the programs of a tenant, except for workers, whose programs are listed under their VM.
fn of_tenant(tenant: &Tenant, vm: Option<&Vm>) -> Vec<Line> {
    let serves = |pid: u32| vm.is_some_and(|vm| vm.programs.iter().any(|program| program.worker == Some(pid)));
    let programs = tenant.programs.iter().filter(|program| !serves(program.pid)).map(|program| {
        let state = unaccounted(tenant, program.pid);
        let process = Process {
            name: program.name.clone(),
            pid: Some(u64::from(program.pid)),
            guest_pid: None,
            window_bytes: None,
            tone: if state.is_some() { Tone::Odd } else { Tone::Good },
            state,
        };
        process.line(&tenant.all_cards(), &tenant.name)
    });
    programs.collect()
}

fn of_vm(vm: &Vm, tenant: Option<&Tenant>) -> Vec<Line> {
    // A process ID of 0 means that the process is not visible. Xen domains have no process.
    let vmm = vm.client.filter(|client| client.domain.is_none() && client.pid > 0);
    let vmm = vmm.map(|Client { pid, uid, .. }| Process {
        name: "VMM".to_owned(),
        pid: u64::try_from(pid).ok(),
        guest_pid: None,
        window_bytes: None,
        state: Some(format!("user {uid}")),
        tone: Tone::Good,
    });
    let program = |program: &GuestProgram| {
        let past = tenant.zip(program.worker).and_then(|(tenant, worker)| unaccounted(tenant, worker));
        Process {
            name: if program.name.is_empty() { NOTHING.to_owned() } else { program.name.clone() },
            pid: program.worker.map(u64::from),
            guest_pid: program.pid.map(u64::from),
            window_bytes: Some(program.window_bytes),
            tone: match (program.lost, &past) {
                (true, _) => Tone::Bad,
                (false, Some(_)) => Tone::Odd,
                (false, None) => Tone::Good,
            },
            state: if program.lost { Some("LOST".to_owned()) } else { past },
        }
    };
    let all = vmm.into_iter().chain(vm.programs.iter().map(program));
    all.map(|process| process.line(&vm.card, &vm.name)).collect()
}

/// A process of a tenant or VM.
struct Process {
    name: String,
    pid: Option<u64>,
    guest_pid: Option<u64>,
    window_bytes: Option<u64>,
    state: Option<String>,
    tone: Tone,
}

impl Process {
    fn line(self, card: &str, user: &str) -> Line {
        let number =
            |pid: Option<u64>| pid.map_or_else(|| Cell::from(NOTHING), |pid| Cell::number(pid.to_string(), pid));
        let window = self.window_bytes.map_or_else(|| Cell::from(NOTHING), |bytes| Cell::number(mib(bytes), bytes));
        let state = self.state.unwrap_or_else(|| NOTHING.to_owned());
        Line {
            cells: vec![
                card.into(),
                user.into(),
                self.name.into(),
                number(self.pid),
                number(self.guest_pid),
                window,
                state.into(),
            ],
            tone: self.tone,
        }
    }
}
