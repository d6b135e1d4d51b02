//! Renders responses as tables for people.

use std::collections::BTreeMap;
use std::fmt::Write;

use tabled::builder::Builder;
use tabled::settings::Style;
use tabled::settings::object::Columns;
use tabled::settings::{Alignment, Modify, Padding};

use admin_client::terminal;
use api::launch::Vmm;
use api::{Card, InterruptKind, LaunchArgs, Vm};

pub mod memory;
pub mod scheduler;

/// Placeholder for an absent value.
pub(super) const NOTHING: &str = "-";

pub(super) fn table(rows: Vec<Vec<String>>, numbers: &[usize]) -> String {
    let mut builder = Builder::default();
    for row in rows {
        // A name with a line break would look like a separate row.
        builder.push_record(row.iter().map(|cell| terminal::word(cell).into_owned()));
    }
    let mut table = builder.build();
    table.with(Style::empty()).with(Padding::new(0, 2, 0, 0));
    for &column in numbers {
        table.with(Modify::new(Columns::one(column)).with(Alignment::right()));
    }
    let lines = table.to_string();
    let lines: Vec<_> = lines.lines().map(str::trim_end).collect();
    lines.join("\n") + "\n"
}

fn row(cells: &[&dyn ToString]) -> Vec<String> {
    cells.iter().map(|cell| cell.to_string()).collect()
}

pub(super) fn heads(names: &[&str]) -> Vec<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

/// Returns the state, including conditions that the operator must notice immediately.
fn state(vm: &Vm) -> String {
    let mut text = vm.state.name().to_owned();
    if vm.memory_not_shared {
        text.push_str(", MEMORY NOT SHARED");
    }
    if vm.memory_withdrawn {
        text.push_str(", MEMORY WITHDRAWN");
    }
    text
}

/// Describes the RAM that the virtual machine lends, the amount that the daemon touched first, and their limits.
fn ram(vm: &Vm) -> String {
    let mib = |bytes: u64| bytes >> 20;
    let api::Ram { lent_bytes, quota_bytes, guarantee_bytes, touched_bytes, touch_limit_bytes, touches_refused } =
        vm.ram;
    let limit = touch_limit_bytes.map(|bytes| format!(" of at most {}", mib(bytes))).unwrap_or_default();
    let refused = if touches_refused == 0 { String::new() } else { format!(", {touches_refused} ACCESSES REFUSED") };
    format!(
        "{} of at most {} MiB, {} guaranteed; {}{limit} MiB touched first by the daemon{refused}",
        mib(lent_bytes),
        mib(quota_bytes),
        mib(guarantee_bytes),
        mib(touched_bytes)
    )
}

fn channels(vm: &Vm) -> String {
    format!("{}/{}", vm.channels_used, vm.channels_limit)
}

fn client(vm: &Vm) -> String {
    match vm.client {
        None => NOTHING.to_owned(),
        Some(api::Client { domain: Some(domain), .. }) => format!("Xen, domain {domain}"),
        Some(client) => format!("pid {} uid {}", client.pid, client.uid),
    }
}

fn socket(vm: &Vm) -> String {
    if let Some(domain) = &vm.xen_domain {
        return format!("(Xen domain {domain})");
    }
    vm.socket.as_ref().map_or_else(|| "(from the service manager)".to_owned(), |path| path.display().to_string())
}

fn interrupts(vm: &Vm) -> &'static str {
    match vm.driver.interrupts {
        InterruptKind::Off => "off",
        InterruptKind::Intx => "INTx",
        InterruptKind::Msi => "MSI",
    }
}

/// Renders all virtual machines; `wide` adds columns.
#[must_use]
pub fn vms(vms: &[Vm], wide: bool) -> String {
    if vms.is_empty() {
        return "no VMs\n".to_owned();
    }
    let mut names = heads(&["NAME", "CARD", "MODE", "STATE", "VRAM MIB", "CHANNELS", "DENIED", "SOCKET"]);
    names.extend(heads(&["CLIENT", "PROFILE", "LENT MIB", "INTERRUPTS"]).into_iter().filter(|_| wide));
    let mut rows = vec![names];
    rows.extend(vms.iter().map(|vm| {
        let (mode, denied) = (vm.mode.name(), vm.denied_total);
        let mut cells =
            row(&[&vm.name, &vm.card, &mode, &state(vm), &vm.vram_mib, &channels(vm), &denied, &socket(vm)]);
        let profile = vm.profile.as_deref().unwrap_or(NOTHING);
        let more = row(&[&client(vm), &profile, &(vm.ram.lent_bytes >> 20), &interrupts(vm)]);
        cells.extend(more.into_iter().filter(|_| wide));
        cells
    }));
    table(rows, if wide { &[4, 5, 6, 10] } else { &[4, 5, 6] })
}

/// Renders a virtual machine that has just been added.
#[must_use]
pub(super) fn vm_added(vm: &Vm) -> String {
    let Vm { name, card, vram_mib, .. } = vm;
    format!(
        "VM {name} added: card {card}, {vram_mib} MiB, socket {}\n\
         see `mediatorctl vm launch-args {name}` for the VMM's arguments\n",
        socket(vm)
    )
}

/// Renders all data of one virtual machine.
#[must_use]
pub fn vm(vm: &Vm) -> String {
    let interrupts = interrupts(vm);
    let mut text = table(
        vec![
            row(&[&"name", &vm.name]),
            row(&[&"card", &vm.card]),
            row(&[&"profile", &vm.profile.as_deref().unwrap_or(NOTHING)]),
            row(&[&"mode", &vm.mode.name()]),
            row(&[&"state", &state(vm)]),
            row(&[&"socket", &socket(vm)]),
            row(&[&"VMM", &client(vm)]),
            row(&[&"PCI id", &vm.driver.pci_id]),
            row(&[&"VRAM", &format!("{} MiB", vm.vram_mib)]),
            row(&[&"RAM lent", &ram(vm)]),
            row(&[&"channels", &channels(vm)]),
            row(&[&"bus master", &yes(vm.driver.bus_master)]),
            row(&[&"interrupts", &interrupts]),
            row(&[&"driver", &vm.driver.state.as_deref().unwrap_or(NOTHING)]),
            row(&[&"memory shared", &if vm.memory_not_shared { "NO" } else { "yes" }]),
            row(&[&"denied accesses", &vm.denied_total]),
        ],
        &[],
    );
    if let Some(error) = &vm.error {
        let _ = writeln!(text, "\nfailed: {error}\n  remove the VM and add it again");
    }
    if vm.memory_not_shared {
        let _ = writeln!(
            text,
            "\nThe VMM does not share guest memory: the card would read zeros there. Start it with shared memory;\n\
             `mediatorctl vm launch-args {}` prints how.",
            vm.name
        );
    }
    if vm.memory_withdrawn {
        let _ = writeln!(text, "\nThe VMM truncated a file of guest memory while the card could access it.");
    }
    if !vm.programs.is_empty() {
        let mut rows = vec![heads(&["CUDA PROGRAM", "PID IN THE GUEST", "WORKER", "WINDOW MIB", "WAITING", "LOST"])];
        rows.extend(vm.programs.iter().map(|program| {
            let name = if program.name.is_empty() { NOTHING } else { &program.name };
            let number = |pid: Option<u32>| pid.map_or_else(|| NOTHING.to_owned(), |pid| pid.to_string());
            let (pid, worker) = (number(program.pid), number(program.worker));
            row(&[&name, &pid, &worker, &(program.window_bytes >> 20), &program.waits, &yes(program.lost)])
        }));
        let _ = write!(text, "\n{}", table(rows, &[1, 2, 3, 4]));
    }
    if !vm.denied.is_empty() {
        let mut rows = vec![heads(&["DENIED AT", "OFFSET", "REASON", "READS", "WRITES"])];
        rows.extend(vm.denied.iter().map(|denied| {
            let offset = denied.offset.map_or_else(|| NOTHING.to_owned(), |offset| format!("{offset:#08x}"));
            row(&[&denied.place, &offset, &denied.reason, &denied.reads, &denied.writes])
        }));
        let _ = write!(text, "\n{}", table(rows, &[3, 4]));
    }
    if !vm.labels.is_empty() {
        let mut rows = vec![heads(&["LABEL", "VALUE"])];
        rows.extend(vm.labels.iter().map(|(key, value)| row(&[&key, &value])));
        let _ = write!(text, "\n{}", table(rows, &[]));
    }
    text.push_str(&counts("DEVICE", &vm.counters));
    text.push_str(&counts("TRANSPORT", &vm.transport));
    text
}

fn counts(title: &str, counts: &BTreeMap<String, u64>) -> String {
    let some: Vec<_> = counts.iter().filter(|&(_, &count)| count != 0).collect();
    if some.is_empty() {
        return String::new();
    }
    let mut rows = vec![heads(&[title, "COUNT"])];
    rows.extend(some.into_iter().map(|(name, count)| row(&[&name.replace('_', " "), count])));
    format!("\n{}", table(rows, &[1]))
}

/// Renders the arguments first, so that users can copy the line, and then notes as comments.
#[must_use]
pub fn launch_args(args: &LaunchArgs) -> String {
    let mut text = format!("{}\n", args.command);
    // For libvirt, the output is a domain's XML, which must stay valid input for `virsh define`.
    let (begin, end) = if args.vmm == Vmm::Libvirt.to_string() { ("<!-- ", " -->") } else { ("# ", "") };
    for note in &args.notes {
        let _ = writeln!(text, "{begin}{note}{end}");
    }
    text
}

fn yes(flag: bool) -> &'static str {
    if flag { "yes" } else { "no" }
}

fn users(card: &Card) -> String {
    let users: Vec<&str> = card.vms.iter().chain(&card.tenants).map(String::as_str).collect();
    if users.is_empty() { NOTHING.to_owned() } else { users.join(" ") }
}

/// Renders all cards; `wide` adds columns.
#[must_use]
pub fn cards(cards: &[Card], wide: bool) -> String {
    if cards.is_empty() {
        return "no cards\n".to_owned();
    }
    let mut names = heads(&["NAME", "KIND", "PCI ID", "VRAM MIB", "ASSIGNED", "FREE", "CHANNELS", "DRAINED", "USERS"]);
    names.extend(heads(&["MODEL", "DEVICE", "UUID", "IN USE MIB", "TROUBLE"]).into_iter().filter(|_| wide));
    let mut rows = vec![names];
    rows.extend(cards.iter().map(|card| {
        let channels = format!("{}/{}", card.channels_used, card.channels);
        let Card { name, kind, pci_id, vram_mib, vram_assigned_mib, vram_free_mib, .. } = card;
        let drained = yes(card.drained);
        let users = users(card);
        let mut cells =
            row(&[name, kind, pci_id, vram_mib, vram_assigned_mib, vram_free_mib, &channels, &drained, &users]);
        let or_absent = |text: &Option<String>| text.clone().unwrap_or_else(|| NOTHING.to_owned());
        let (device, uuid, trouble) = (or_absent(&card.device), or_absent(&card.uuid), or_absent(&card.error));
        let more = row(&[&card.model, &device, &uuid, &card.vram_placed_mib, &trouble]);
        cells.extend(more.into_iter().filter(|_| wide));
        cells
    }));
    table(rows, if wide { &[3, 4, 5, 6, 12] } else { &[3, 4, 5, 6] })
}

/// Renders all data of one card.
#[must_use]
pub fn card(card: &Card) -> String {
    let mib = |mib: u64| format!("{mib} MiB");
    let mode = if card.passthrough { "passthrough" } else { "shared" };
    let cuda = card.kind == "cuda";
    let mut rows = vec![
        row(&[&"name", &card.name]),
        row(&[&"kind", &card.kind]),
        row(&[&"PCI id", &if card.pci_id.is_empty() { NOTHING } else { &card.pci_id }]),
        row(&[&"model", &card.model]),
    ];
    rows.extend(card.uuid.iter().map(|uuid| row(&[&"UUID", uuid])));
    rows.extend(card.device.iter().map(|device| row(&[&"device", device])));
    rows.extend([
        row(&[&"mode", &mode]),
        row(&[&"drained", &yes(card.drained)]),
        row(&[&"trouble", &card.error.as_deref().unwrap_or(NOTHING)]),
        row(&[&"VRAM", &mib(card.vram_mib)]),
        row(&[&"  assigned", &mib(card.vram_assigned_mib)]),
        row(&[&"    in use", &mib(card.vram_placed_mib)]),
        row(&[&"  kept by the mediator", &mib(card.vram_reserved_mib)]),
        row(&[&"    in use", &mib(card.vram_mediator_mib)]),
        row(&[&"  free", &mib(card.vram_free_mib)]),
    ]);
    if cuda {
        // Omit the apertures and channels, which the driver manages on this card.
        rows.extend([
            row(&[&"tenants", &users(card)]),
            row(&[&"strangers", &strangers(card)]),
            row(&[&"unexplained", &mib(card.unexplained_bytes >> 20)]),
            row(&[&"owner restarts", &card.owner_restarts.unwrap_or(0)]),
        ]);
    } else {
        rows.extend([
            row(&[&"BAR1", &mib(card.bar1_mib)]),
            row(&[&"BAR3", &mib(card.bar3_mib)]),
            row(&[&"channels", &format!("{}/{}", card.channels_used, card.channels)]),
            row(&[&"VMs", &users(card)]),
        ]);
    }
    table(rows, &[])
}

/// Renders processes that use a CUDA card without its owner.
fn strangers(card: &Card) -> String {
    let shown: Vec<_> = card.strangers.iter().map(|one| format!("{} ({})", one.program, one.pid)).collect();
    if shown.is_empty() { NOTHING.to_owned() } else { shown.join(" ") }
}
