//! Rules for a configuration that the types of its values do not express.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use super::cuda::placement_order;
use super::labels::MAX_LABELS;
pub use super::refusal::{Refusal, RefusalKind};
use super::{
    CardKind, CardSpec, Config, DaemonSpec, Links, Paravirtual, RamSpec, TenantSpec, TimeShare, VmMemory, VmSpec,
};

pub mod place;

/// Maximum length of the name of a card, virtual machine or tenant, in bytes.
pub const MAX_NAME: usize = 63;
/// Maximum length of a UNIX socket path, in bytes.
pub(crate) const MAX_SOCKET_PATH: usize = 107;
/// Number of channels of a card, which is also the maximum for a virtual machine.
pub const MAX_CHANNELS: u32 = 128;
/// Maximum number of virtual machines, which bounds threads and sockets.
pub const MAX_VMS: usize = 64;
/// Maximum number of tenants, which bounds the number of sockets and the size of status responses.
pub const MAX_TENANTS: usize = 64;
/// Maximum time limit for a channel without progress, in milliseconds: one hour.
pub(crate) const MAX_HANG_LIMIT_MS: u64 = 3_600_000;
/// Minimum time limit for a channel without progress, in milliseconds: copying a few hundred MiB takes this long.
pub(crate) const MIN_HANG_LIMIT_MS: u64 = 100;
/// Upper bound of a software card's rates, in MHz or MiB per second. It exceeds the rates of all cards, and cannot
/// cause an overflow.
pub(crate) const RATE_MAX: u64 = 1 << 32;
/// Minimum VRAM that a guest driver needs to start, in MiB.
pub const MIN_VM_VRAM_MIB: u64 = 16;

/// A key in the file: `table.field` or `table[index].field`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// Name of the table.
    pub table: &'static str,
    /// Index of the table, counted from 0, if there can be several.
    pub index: Option<usize>,
    /// Key in the table; empty for the whole table.
    pub field: &'static str,
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.table)?;
        if let Some(index) = self.index {
            write!(f, "[{index}]")?;
        }
        if !self.field.is_empty() {
            write!(f, ".{}", self.field)?;
        }
        Ok(())
    }
}

/// A key with a wrong value, a description of the error, and the expected value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    /// The key with the wrong value.
    pub key: Key,
    /// Description of the error and the expected value.
    pub what: String,
}

/// Collects the errors of one table.
struct Table<'a> {
    name: &'static str,
    index: Option<usize>,
    mistakes: &'a mut Vec<Mistake>,
}

impl Table<'_> {
    fn say(&mut self, field: &'static str, what: String) {
        self.mistakes.push(Mistake { key: Key { table: self.name, index: self.index, field }, what });
    }

    fn name(&mut self, name: &str) {
        if let Err(what) = name_is_good(name) {
            self.say("name", what);
        }
    }

    fn socket(&mut self, field: &'static str, path: &Path) {
        if let Err(what) = socket_path_is_good(path) {
            self.say(field, what);
        }
    }
}

/// Checks that a name is valid for a card, virtual machine or tenant.
///
/// # Errors
/// If the name is invalid, returns an error that describes the expected format.
pub fn name_is_good(name: &str) -> Result<(), String> {
    let first = name.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    let rest = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    if first && rest && name.len() <= MAX_NAME {
        return Ok(());
    }
    let shown: String = name.chars().take(MAX_NAME).collect();
    Err(format!(
        "{shown:?} is not a name, expected 1 to {MAX_NAME} of the characters A-Z a-z 0-9 . _ - with a letter or a digit first"
    ))
}

fn socket_path_is_good(path: &Path) -> Result<(), String> {
    let shown = path.display();
    if !path.is_absolute() {
        return Err(format!("`{shown}` is not an absolute path, expected one such as /run/gpu-mediator/a.sock"));
    }
    let len = path.as_os_str().len();
    if len > MAX_SOCKET_PATH {
        return Err(format!(
            "`{shown}` has {len} bytes, expected a path of at most {MAX_SOCKET_PATH} for a UNIX socket"
        ));
    }
    Ok(())
}

/// Returns all errors of a configuration.
#[must_use]
pub fn config(config: &Config) -> Vec<Mistake> {
    let mut mistakes = Vec::new();
    daemon(&config.daemon, &mut mistakes);
    let mut cards = BTreeMap::new();
    for (index, card) in config.cards.iter().enumerate() {
        let mut table = Table { name: "card", index: Some(index), mistakes: &mut mistakes };
        check_card(card, &mut table);
        for (field, what) in super::vfio::card(card, &config.cards[..index]) {
            table.say(field, what);
        }
        if let Some(what) = super::cuda::shared_users(card, &config.cards[..index]) {
            table.say("cuda.worker_users", what);
        }
        if let Some(first) = cards.insert(card.name.as_str(), index) {
            table.say("name", format!("`{}` is also the name of card[{first}], expected another", card.name));
        }
    }
    if config.vms.len() > MAX_VMS {
        let key = Key { table: "vm", index: Some(MAX_VMS), field: "" };
        let what = format!("{} virtual machines, expected at most {MAX_VMS}", config.vms.len());
        mistakes.push(Mistake { key, what });
    }
    let mut others: Vec<&VmSpec> = Vec::new();
    for (index, vm) in config.vms.iter().enumerate() {
        let key = |field| Key { table: "vm", index: Some(index), field };
        for Refusal { field, what, .. } in self::vm(vm, &config.daemon, &config.cards, &others) {
            mistakes.push(Mistake { key: key(field), what });
        }
        others.push(vm);
    }
    if config.tenants.len() > MAX_TENANTS {
        let key = Key { table: "tenant", index: Some(MAX_TENANTS), field: "" };
        mistakes
            .push(Mistake { key, what: format!("{} tenants, expected at most {MAX_TENANTS}", config.tenants.len()) });
    }
    let vms: Vec<&str> = config.vms.iter().map(|vm| vm.name.as_str()).collect();
    let mut placed: Vec<TenantSpec> = Vec::new();
    for index in placement_order(&config.tenants) {
        let mut table = Table { name: "tenant", index: Some(index), mistakes: &mut mistakes };
        let others: Vec<&TenantSpec> = placed.iter().collect();
        // Only the daemon knows the links between cards. Without links, this check may choose other cards, but the
        // memory sizes are the same.
        let policy = (config.daemon.placement, &Links::default());
        let spec = config.tenants[index].clone().placed(policy, &config.cards, &vms, &others);
        for Refusal { field, what, .. } in self::tenant(&spec, &config.daemon, &config.cards, &vms, &others) {
            table.say(field, what);
        }
        placed.push(spec);
    }
    mistakes
}

/// Returns the errors in the changeable settings of a card.
#[must_use]
pub fn card_settings(card: &CardSpec) -> Vec<String> {
    let told = |(key, what): (&str, String)| format!("{key}: {what}");
    if card.kind == CardKind::Cuda {
        let memory = super::cuda::memory(card);
        return super::cuda::scheduler(&card.scheduler).into_iter().chain(memory).map(told).collect();
    }
    let scheduler = card.scheduler.check().err().map(|error| format!("scheduler.{error}"));
    let memory = card.memory.check(card.chunk_kib, card.shared_mib()).into_iter().map(told);
    scheduler.into_iter().chain(memory).collect()
}

/// Returns the folder of a socket if it is named after the tenant or virtual machine, and therefore exclusive to it.
#[must_use]
pub fn own_folder<'a>(name: &str, socket: &'a Path, socket_dir: &Path) -> Option<&'a Path> {
    let folder = socket.parent().filter(|folder| folder.file_name().is_some_and(|own| own == name))?;
    // The daemon's socket folder and its parents are not exclusive, even if one has this name.
    (!socket_dir.starts_with(folder)).then_some(folder)
}

/// Returns the reason to reject a socket that shares an exclusive folder with another object's socket: containers see
/// the whole folder.
fn intrudes<'a>(
    name: &str,
    socket: &Path,
    mut others: impl Iterator<Item = (&'a str, PathBuf)>,
    daemon: &DaemonSpec,
) -> Option<String> {
    let within = |name: &str, own: &Path, socket: &Path| {
        own_folder(name, own, &daemon.socket_dir).is_some_and(|own| socket.starts_with(own))
    };
    let other =
        others.find(|(other, path)| *other != name && (within(other, path, socket) || within(name, socket, path)));
    if let Some((other, path)) = other {
        let (shown, theirs) = (socket.display(), path.display());
        return Some(format!(
            "`{shown}` and `{theirs}` of `{other}` share a folder that is named after one of them, expected a separate folder for each"
        ));
    }
    let own = [Some(&daemon.admin_socket), daemon.read_socket.as_ref()].into_iter().flatten();
    let own = own.into_iter().find(|path| **path != socket && within(name, socket, path))?;
    Some(format!(
        "the daemon's own socket `{}` is in the folder of `{}`, expected another path",
        own.display(),
        socket.display()
    ))
}

/// Returns all reasons to reject a tenant, given the names of virtual machines and the tenants `others`.
#[must_use]
pub fn tenant(
    tenant: &TenantSpec,
    daemon: &DaemonSpec,
    cards: &[CardSpec],
    vms: &[&str],
    others: &[&TenantSpec],
) -> Vec<Refusal> {
    let mut refusals = Vec::new();
    let mut say = |kind, field, what| refusals.push(Refusal { kind, field, what });
    if let Err(what) = name_is_good(&tenant.name) {
        say(RefusalKind::Invalid, "name", what);
    }
    if let Err(what) = tenant.labels.check() {
        say(RefusalKind::Invalid, "labels", what);
    }
    if !tenant.cards.is_absent()
        && tenant.socket.is_none()
        && daemon.socket_dir.as_os_str().as_encoded_bytes().contains(&b':')
    {
        let what = format!(
            "programs get the sockets of several cards separated by `:`, expected a `daemon.socket_dir` without \
             `:` instead of `{}`",
            daemon.socket_dir.display()
        );
        say(RefusalKind::Invalid, "cards", what);
    }
    for card in tenant.cards.iter() {
        if let Err(what) = socket_path_is_good(&daemon.socket_dir.join(super::cuda::owner_socket(card))) {
            say(RefusalKind::Invalid, "cards", what);
        }
    }
    for socket in tenant.socket_paths(&daemon.socket_dir) {
        if let Err(what) = socket_path_is_good(&socket) {
            say(RefusalKind::Invalid, "socket", what);
        }
        if (tenant.cards.is_absent() || tenant.socket.is_some())
            && socket.as_os_str().as_encoded_bytes().contains(&b':')
        {
            let what = format!("`{}` contains `:`, which separates sockets for programs", socket.display());
            say(RefusalKind::Invalid, "socket", what);
        }
        let paths = || {
            let all = |other: &&TenantSpec| (other.name.clone(), other.socket_paths(&daemon.socket_dir));
            others.iter().map(all).filter(|(name, _)| *name != tenant.name)
        };
        if let Some((other, _)) = paths().find(|(_, paths)| paths.contains(&socket)) {
            let what = format!("`{}` is the socket of tenant `{other}`, expected another path", socket.display());
            say(RefusalKind::Conflict, "socket", what);
        } else {
            let all = others.iter().flat_map(|other| {
                other.socket_paths(&daemon.socket_dir).into_iter().map(|path| (other.name.as_str(), path))
            });
            if let Some(what) = intrudes(&tenant.name, &socket, all, daemon) {
                say(RefusalKind::Conflict, "socket", what);
            }
        }
        if socket == daemon.admin_socket || daemon.read_socket.as_ref() == Some(&socket) {
            let what = format!("`{}` is the daemon's own socket, expected another path", socket.display());
            say(RefusalKind::Conflict, "socket", what);
        }
    }
    refusals.extend(super::cuda::tenant(tenant, cards, vms, others));
    refusals
}

fn daemon(daemon: &DaemonSpec, mistakes: &mut Vec<Mistake>) {
    let mut table = Table { name: "daemon", index: None, mistakes };
    table.socket("admin_socket", &daemon.admin_socket);
    if let Some(path) = &daemon.read_socket {
        table.socket("read_socket", path);
        if *path == daemon.admin_socket {
            table.say("read_socket", format!("`{}` is the admin socket, expected another path", path.display()));
        }
    }
    if let Some(page) = daemon.page.filter(|page| !page.ip().is_loopback() || page.port() == 0) {
        let what = format!(
            "`{page}` is not a loopback address with a port, expected one such as 127.0.0.1:9470; for other hosts, let a proxy with \
             a password serve the read-only socket"
        );
        table.say("page", what);
    }
    if !daemon.socket_dir.is_absolute() {
        let what = format!(
            "`{}` is not an absolute path, expected a folder such as /run/gpu-mediator",
            daemon.socket_dir.display()
        );
        table.say("socket_dir", what);
    }
    if let Some(folder) = daemon.state_dir.as_ref().filter(|folder| !folder.is_absolute()) {
        let what =
            format!("`{}` is not an absolute path, expected a folder such as /var/lib/gpu-mediator", folder.display());
        table.say("state_dir", what);
    }
    for (field, what) in daemon.rebalance.iter().flat_map(super::RebalanceSpec::check) {
        table.say(field, what);
    }
    if let Err(error) = crate::filter::parse_filter(&daemon.log) {
        table.say(
            "log",
            format!(
                "`{}` is not a log filter ({error}), expected one such as \"info\" or \"info,mediator=debug\"",
                daemon.log
            ),
        );
    }
}

fn check_card(card: &CardSpec, table: &mut Table<'_>) {
    table.name(&card.name);
    if card.kind == CardKind::Cuda {
        for (field, what) in super::cuda::card(card) {
            table.say(field, what);
        }
        return;
    }
    if card.cuda.is_some() {
        table.say("cuda", "expected no such table unless kind = \"cuda\"".to_owned());
    }
    if !(16..=6144).contains(&card.vram_mib) {
        table.say("vram_mib", format!("{} MiB, expected 16 to 6144", card.vram_mib));
    }
    for (field, mib) in [("bar1_mib", card.bar1_mib), ("bar3_mib", card.bar3_mib)] {
        if !mib.is_power_of_two() || !(16..=512).contains(&mib) {
            table.say(field, format!("{mib} MiB, expected a power of two from 16 to 512"));
        }
    }
    if !card.chunk_kib.is_power_of_two() || !(128..=65536).contains(&card.chunk_kib) {
        table.say("chunk_kib", format!("{} KiB, expected a power of two from 128 to 65536", card.chunk_kib));
    }
    if let Err(error) = card.scheduler.check() {
        table.say("scheduler", error.to_string());
    }
    for (field, what) in card.memory.check(card.chunk_kib, card.shared_mib()) {
        table.say(field, what);
    }
    let reserve = card.reserve_mib();
    if reserve == 0 || reserve >= card.vram_mib {
        table.say(
            "reserve_mib",
            format!("{reserve} MiB of {} MiB, expected at least 1 MiB and less than all", card.vram_mib),
        );
    }
    // The structures of the layout, the page tables of the copy channels, and a guest's page tables need separate
    // chunks.
    let least = (4u64 << 10).div_ceil(card.chunk_kib.max(1)).saturating_add(2).saturating_mul(card.chunk_kib) >> 10;
    if card.memory.host_mib != 0 && reserve < least {
        let what = format!(
            "{reserve} MiB, expected at least {least} with `memory.host_mib` and chunks of {} KiB",
            card.chunk_kib
        );
        table.say("reserve_mib", what);
    }
    let rates = card.time.map(|time| {
        [
            ("time.copy_mib_per_s", time.copy_mib_per_s, 1),
            ("time.shader_mhz", time.shader_mhz, 1),
            ("time.shader_mib_per_s", time.shader_mib_per_s, 1),
            // 0 means no limit.
            ("time.bus_mib_per_s", time.bus_mib_per_s, 0),
        ]
    });
    for (key, rate, least) in rates.into_iter().flatten() {
        if rate < least {
            table.say(key, "0, expected at least 1; omit `time` for \"as fast as possible\"".to_owned());
        }
        if rate > RATE_MAX {
            table.say(key, format!("{rate}, expected at most {RATE_MAX}"));
        }
    }
}

/// Returns all reasons to reject a virtual machine, given the other virtual machines `others`.
#[must_use]
pub fn vm(vm: &VmSpec, daemon: &DaemonSpec, cards: &[CardSpec], others: &[&VmSpec]) -> Vec<Refusal> {
    let mut refusals = Vec::new();
    let mut say = |kind, field, what| refusals.push(Refusal { kind, field, what });

    if let Err(what) = name_is_good(&vm.name) {
        say(RefusalKind::Invalid, "name", what);
    }
    if let Err(what) = vm.labels.check() {
        say(RefusalKind::Invalid, "labels", what);
    }
    for (field, labels) in [("near", &vm.near), ("apart_from", &vm.apart_from)] {
        if labels.len() > MAX_LABELS {
            say(RefusalKind::Invalid, field, format!("{} labels, expected at most {MAX_LABELS}", labels.len()));
        }
    }
    if others.iter().any(|other| other.name == vm.name) {
        say(RefusalKind::Conflict, "name", format!("`{}` is the name of another VM, expected a new one", vm.name));
    }
    let socket = vm.socket_path(&daemon.socket_dir);
    if let Err(what) = socket_path_is_good(&socket) {
        say(RefusalKind::Invalid, "socket", what);
    }
    let workers = vm.cuda.map(|_| super::workers_socket(&vm.name, &vm.card, &daemon.socket_dir));
    if let Some(Err(what)) = workers.as_deref().map(socket_path_is_good) {
        say(RefusalKind::Invalid, "name", format!("{what}, for the socket of its workers"));
    }
    let user = others.iter().find(|other| other.socket_path(&daemon.socket_dir) == socket);
    if let Some(other) = user.filter(|other| other.name != vm.name) {
        let what = format!("`{}` is the socket of VM `{}`, expected another path", socket.display(), other.name);
        say(RefusalKind::Conflict, "socket", what);
    } else {
        let paths = others.iter().map(|other| (other.name.as_str(), other.socket_path(&daemon.socket_dir)));
        if let Some(what) = intrudes(&vm.name, &socket, paths, daemon) {
            say(RefusalKind::Conflict, "socket", what);
        }
    }
    for (of_daemon, name) in [(Some(&daemon.admin_socket), "admin"), (daemon.read_socket.as_ref(), "read-only")] {
        if of_daemon == Some(&socket) {
            let what = format!("`{}` is the {name} socket, expected another path", socket.display());
            say(RefusalKind::Conflict, "socket", what);
        }
    }
    if !(1..=MAX_CHANNELS).contains(&vm.channels()) {
        say(RefusalKind::Invalid, "channels", format!("{}, expected 1 to {MAX_CHANNELS}", vm.channels()));
    }

    let limits = MIN_HANG_LIMIT_MS..=MAX_HANG_LIMIT_MS;
    if let Some(limit) = vm.hang_limit_ms.filter(|limit| *limit != 0 && !limits.contains(limit)) {
        let what = format!("{limit}, expected 0 or {MIN_HANG_LIMIT_MS} to {MAX_HANG_LIMIT_MS}");
        say(RefusalKind::Invalid, "hang_limit_ms", what);
    }

    if let Err(error) = vm.time_share().check() {
        say(RefusalKind::Invalid, "time", error.to_string());
    }
    refusals.extend(super::xen::vm(vm, cards, others));
    let mut say = |kind, field, what| refusals.push(Refusal { kind, field, what });

    if vm.card.is_empty() && !cards.is_empty() {
        refusals.extend(place::nowhere(vm, daemon, cards, others));
        return refusals;
    }
    let Some(card) = cards.iter().find(|card| card.name == vm.card) else {
        let known: Vec<_> = cards.iter().map(|card| format!("`{}`", card.name)).collect();
        let known = if known.is_empty() { "a [[card]] table first".to_owned() } else { known.join(" or ") };
        say(RefusalKind::UnknownCard, "card", format!("there is no card `{}`, expected {known}", vm.card));
        return refusals;
    };
    if card.kind == CardKind::Cuda {
        refusals.extend(super::function::vm(vm, card, cards, others));
        return refusals;
    }
    if vm.cuda.is_some() {
        let what = format!("expected no such table on card `{}`, only with kind = \"cuda\"", card.name);
        say(RefusalKind::Invalid, "cuda", what);
    }
    let beside: Vec<_> = others.iter().filter(|other| other.card == vm.card && other.name != vm.name).collect();
    for (field, what) in vm.memory.check(card).into_iter().chain(vm.paravirtual.check()) {
        say(RefusalKind::Invalid, field, what);
    }
    if let Some(what) = beside.iter().find_map(|other| place::apart(vm, other)) {
        say(RefusalKind::Conflict, "apart_from", format!("{what} on card `{}`, expected another card", card.name));
    }
    if vm.passthrough {
        if vm.paravirtual != Paravirtual::default() {
            let what =
                "expected no such table with passthrough = true, because passthrough bypasses the mediator".to_owned();
            say(RefusalKind::Invalid, "paravirtual", what);
        }
        if vm.memory != VmMemory::default() {
            let what = "expected no such table with passthrough = true, which gives the VM the whole card".to_owned();
            say(RefusalKind::Invalid, "memory", what);
        }
        if let Some(vram) = vm.vram_mib {
            let what =
                format!("{vram}, expected no such key with passthrough = true, which gives the VM the whole card");
            say(RefusalKind::Invalid, "vram_mib", what);
        }
        if vm.time != TimeShare::default() {
            let what =
                "expected no such table with passthrough = true, because the card's time is not shared".to_owned();
            say(RefusalKind::Invalid, "time", what);
        }
        if let Some(other) = beside.first() {
            let what = format!("VM `{}` uses card `{}`, expected an unused card for passthrough", other.name, vm.card);
            say(RefusalKind::Conflict, "passthrough", what);
        }
        return refusals;
    }
    if let Some(other) = beside.iter().find(|other| other.passthrough) {
        let what = format!("VM `{}` uses card `{}` in passthrough, expected another card", other.name, vm.card);
        say(RefusalKind::Conflict, "card", what);
    }
    let guaranteed = |vm: &VmSpec| vm.memory.ram.on(&card.memory).guarantee_mib.unwrap_or(0);
    let (wanted, taken) = (guaranteed(vm), beside.iter().map(|other| guaranteed(other)).fold(0, u64::saturating_add));
    let left = RamSpec::ALL_MIB.saturating_sub(taken);
    if wanted > left {
        let what = format!(
            "{wanted} MiB, expected at most {left}: card `{}` has bus addresses for {} MiB, other VMs are guaranteed {taken}; \
             lower theirs or `memory.ram.guarantee_mib` of the card",
            card.name,
            RamSpec::ALL_MIB
        );
        say(RefusalKind::Quota, "memory.ram.guarantee_mib", what);
    }
    vram(vm, card, &beside, &mut say);
    refusals
}

fn vram(vm: &VmSpec, card: &CardSpec, beside: &[&&VmSpec], say: &mut impl FnMut(RefusalKind, &'static str, String)) {
    let Some(vram) = vm.vram_mib else {
        let what = format!("missing, expected at least {MIN_VM_VRAM_MIB} MiB of VRAM, or passthrough = true");
        return say(RefusalKind::Invalid, "vram_mib", what);
    };
    if vram < MIN_VM_VRAM_MIB {
        return say(RefusalKind::Invalid, "vram_mib", format!("{vram} MiB, expected at least {MIN_VM_VRAM_MIB}"));
    }
    let chunk = card.chunk_kib;
    if chunk != 0 && vram.checked_mul(1024).is_none_or(|kib| kib % chunk != 0) {
        say(RefusalKind::Invalid, "vram_mib", format!("{vram} MiB, expected a multiple of the chunk of {chunk} KiB"));
    }
    memory(vm, vram, card, beside, say);
}

/// Checks that the card has enough memory for the guest's guarantee, and enough host memory for the rest if it is
/// swapped.
fn memory(
    vm: &VmSpec,
    vram: u64,
    card: &CardSpec,
    beside: &[&&VmSpec],
    say: &mut impl FnMut(RefusalKind, &'static str, String),
) {
    let others = |of: fn(&VmMemory, u64, &CardSpec) -> u64| {
        let each = beside.iter().filter_map(|other| Some(of(&other.memory, other.vram_mib?, card)));
        each.fold(0, u64::saturating_add)
    };
    let own = &vm.memory;
    let (guaranteed, taken) = (own.guaranteed_mib(vram, card), others(VmMemory::guaranteed_mib));
    let left = card.shared_mib().saturating_sub(taken);
    if guaranteed > left {
        let field = if own.guarantee_mib.is_some() { "memory.guarantee_mib" } else { "vram_mib" };
        let what = format!(
            "{guaranteed} MiB, expected at most {left}: card `{}` has {} MiB, the mediator reserves {}, other VMs are \
             guaranteed {taken}",
            card.name,
            card.vram_mib,
            card.reserve_mib(),
        );
        say(RefusalKind::Quota, field, what);
    }
    let (swapped, taken) = (own.swapped_mib(vram, card), others(VmMemory::swapped_mib));
    if let Some(cap) = own.swap_cap_mib.filter(|cap| *cap < swapped) {
        let what = format!(
            "{cap} MiB, expected at least {swapped}: the guest sees {vram} MiB, of which {guaranteed} are guaranteed, and \
             swaps the rest"
        );
        say(RefusalKind::Invalid, "memory.swap_cap_mib", what);
    }
    let left = card.memory.host_mib.saturating_sub(taken);
    if swapped > left {
        let what = format!(
            "{vram} MiB of which {guaranteed} are guaranteed may need {swapped} MiB of host memory, expected at most {left}: \
             `memory.host_mib` of card `{}` is {}, other VMs may need {taken}; raise it or the VM's `memory.guarantee_mib`, \
             or choose `memory.on_full = \"queue\"`",
            card.name, card.memory.host_mib,
        );
        say(RefusalKind::Quota, "vram_mib", what);
    }
}
