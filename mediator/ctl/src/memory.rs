//! `mediatorctl memory`: shows the usage of cards' memory, and changes memory settings of cards and virtual machines.

mod profile;

use clap::{Args, Subcommand};
use hyper::Method;
use serde_json::{Map, Value, json};
use vram::victim::VictimPolicy;
use vram::{Mode, OnFull};

pub(super) use self::profile::ProfileCommand;
use super::client::{self, Client, ClientError};
use super::watch::Watch;
use super::{Form, output, values};
use config::{RamSpec, VmMemory};

#[derive(Clone, Debug, Subcommand)]
pub(super) enum MemoryCommand {
    /// Shows how the memory of all cards, or of one card, is used
    Show {
        /// Name of the card
        card: Option<String>,
        #[command(flatten)]
        watch: Watch,
    },
    /// Changes how a card's memory is divided, with immediate effect
    Set(SetCard),
    /// Changes a virtual machine's maximum memory on the card; excess memory moves to host memory
    SetQuota(SetSize),
    /// Changes a virtual machine's guaranteed memory on the card
    SetGuarantee(SetSize),
    /// Changes a virtual machine's maximum host memory
    SetSwapCap(SetSize),
    /// Changes how much RAM a virtual machine may lend to the card
    SetRam(SetRam),
    /// Changes a virtual machine's weight for the card's memory while memory is short
    SetWeight {
        /// Name of the virtual machine
        vm: String,
        /// Weight from 1 to 10000, relative to the weights of other virtual machines
        weight: u32,
    },
    /// Changes the policy for a virtual machine that needs memory while the card has none left
    SetPolicy {
        /// Name of the virtual machine
        vm: String,
        /// Policy: swap, queue or refuse
        policy: OnFull,
        /// With queue: maximum time that work waits for memory before its channel faults, in milliseconds
        #[arg(long, value_name = "MS")]
        queue_ms: Option<u64>,
    },
    /// Pins a range of a guest's VRAM to the card
    Pin {
        /// Name of the virtual machine
        vm: String,
        /// Range as START+LENGTH, such as 16M+4M
        range: RangeOf,
    },
    /// Unpins a range of a guest's VRAM
    Unpin {
        /// Name of the virtual machine
        vm: String,
        /// Range as START+LENGTH, such as 16M+4M
        range: RangeOf,
    },
    /// Sets the priority of a range of a guest's VRAM; with victims = priority, the lowest priority is evicted first
    Priority {
        /// Name of the virtual machine
        vm: String,
        /// Range as START+LENGTH, such as 16M+4M
        range: RangeOf,
        /// Priority from 0 to 255; 128 by default
        priority: u8,
    },
    /// Records or loads access counts of ranges of a guest's VRAM, for victims = profiled
    #[command(subcommand)]
    Profile(ProfileCommand),
    /// Moves a virtual machine's memory to host memory; the memory returns once the card has space, unless the quota is
    /// lower
    Evict(Move),
    /// Moves a virtual machine's memory back to the card
    Return(Move),
}

#[derive(Clone, Debug, Args)]
pub(super) struct SetCard {
    /// Name of the card
    card: String,
    #[command(flatten)]
    settings: Settings,
}

/// Memory settings of a card. Omitted settings stay unchanged.
#[derive(Clone, Debug, Args)]
#[group(required = true, multiple = true)]
struct Settings {
    /// Maximum pinned host memory; at most the value at daemon startup
    #[arg(long, value_name = "SIZE", value_parser = values::mib)]
    host_mib: Option<u64>,
    /// Card memory reserved for immediate evictions
    #[arg(long, value_name = "SIZE", value_parser = values::mib)]
    reserve_mib: Option<u64>,
    /// Policy that selects which chunk of a VM to evict first: random, priority, profiled or clock
    #[arg(long, value_name = "POLICY")]
    victims: Option<VictimPolicy>,
    /// Interval at which the daemon checks if chunks can return to the card, in milliseconds
    #[arg(long, value_name = "MS")]
    return_ms: Option<u64>,
    /// Minimum time between two moves of a chunk, in milliseconds
    #[arg(long, value_name = "MS")]
    settle_ms: Option<u64>,
    /// Time without work after which a VM counts as idle and yields memory to VMs with work, in milliseconds
    #[arg(long, value_name = "MS")]
    idle_ms: Option<u64>,
    /// Card memory that stays free when chunks return
    #[arg(long, value_name = "SIZE", value_parser = values::mib)]
    low_water_mib: Option<u64>,
    /// Memory quanta for VMs whose memory does not fit on the card together: auto, off or forced
    #[arg(long, value_name = "MODE")]
    quanta: Option<Mode>,
    /// Default RAM quota of VMs: maximum RAM that a VM may lend, or `default`
    #[arg(long, value_name = "SIZE")]
    ram_quota_mib: Option<Mib>,
    /// Default RAM guarantee of VMs: lent RAM for which bus addresses are reserved, or `default`
    #[arg(long, value_name = "SIZE")]
    ram_guarantee_mib: Option<Mib>,
    /// Default touch limit of VMs: maximum RAM that the daemon or the card may touch first, or `default`
    #[arg(long, value_name = "SIZE")]
    ram_touch_mib: Option<Mib>,
}

/// RAM that one virtual machine lends to the card. Omitted settings stay unchanged.
#[derive(Clone, Copy, Debug, Args)]
#[group(required = true, multiple = true)]
struct RamSettings {
    /// Maximum RAM that the virtual machine may lend, or `default`
    #[arg(long, value_name = "SIZE")]
    ram_quota_mib: Option<Mib>,
    /// Lent RAM for which bus addresses are reserved, or `default`
    #[arg(long, value_name = "SIZE")]
    ram_guarantee_mib: Option<Mib>,
    /// Maximum RAM that the daemon or the card may touch first, or `default`
    #[arg(long, value_name = "SIZE")]
    ram_touch_mib: Option<Mib>,
}

/// Returns the `ram` table of a patch (quota, guarantee, and first-touch limit), or `None` if none of them is given.
fn ram_patch(sizes: [Option<Mib>; 3]) -> Option<Value> {
    let keys = ["quota_mib", "guarantee_mib", "touch_mib"].into_iter().zip(sizes);
    let said: Map<_, _> = keys.filter_map(|(key, size)| Some((key.to_owned(), json!(size?.0)))).collect();
    (!said.is_empty()).then_some(Value::Object(said))
}

#[derive(Clone, Debug, Args)]
pub(super) struct SetRam {
    /// Name of the virtual machine
    vm: String,
    #[command(flatten)]
    settings: RamSettings,
}

impl Settings {
    fn patch(&self) -> Map<String, Value> {
        let numbers = [
            ("host_mib", self.host_mib),
            ("reserve_mib", self.reserve_mib),
            ("return_ms", self.return_ms),
            ("settle_ms", self.settle_ms),
            ("idle_ms", self.idle_ms),
            ("low_water_mib", self.low_water_mib),
        ];
        let numbers = numbers.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?.into())));
        let victims = self.victims.map(|victims| ("victims".to_owned(), json!(victims.name())));
        let quanta = self.quanta.map(|mode| ("quanta".to_owned(), json!({ "mode": mode.name() })));
        let ram = ram_patch([self.ram_quota_mib, self.ram_guarantee_mib, self.ram_touch_mib]);
        let ram = ram.map(|ram| ("ram".to_owned(), ram));
        numbers.chain(victims).chain(quanta).chain(ram).collect()
    }
}

/// A size in MiB, or `None` for `default`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mib(Option<u64>);

impl std::str::FromStr for Mib {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "default" {
            return Ok(Self(None));
        }
        values::mib(text).map(|mib| Self(Some(mib))).map_err(|error| format!("{error}, or `default`"))
    }
}

#[derive(Clone, Debug, Args)]
pub(super) struct SetSize {
    /// Name of the virtual machine
    vm: String,
    /// Size such as 20G, or `default`
    size: Mib,
}

/// A range of a guest's VRAM: `START+LENGTH`, each in bytes or with a unit (K, M or G).
#[derive(Clone, Copy, Debug)]
pub(super) struct RangeOf(api::Range);

impl std::str::FromStr for RangeOf {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is not a range, expected START+LENGTH such as 16M+4M or 0x1000000+0x400000");
        let (start, bytes) = text.split_once('+').ok_or_else(wrong)?;
        let (start, bytes) = (size(start).ok_or_else(wrong)?, size(bytes).ok_or_else(wrong)?);
        Ok(Self(api::Range { start, bytes }))
    }
}

/// Parses a byte count: decimal, hexadecimal, or with a unit.
fn size(text: &str) -> Option<u64> {
    if let Some(digits) = text.strip_prefix("0x") {
        return u64::from_str_radix(digits, 16).ok();
    }
    let units = [('K', 10), ('M', 20), ('G', 30)];
    let unit = units.into_iter().find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, shift)));
    let (digits, shift) = unit.unwrap_or((text, 0));
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[derive(Clone, Debug, Args)]
pub(super) struct Move {
    /// Name of the virtual machine
    vm: String,
    /// Maximum amount to move; by default, everything that can move
    #[arg(long, value_name = "SIZE", value_parser = values::mib)]
    mib: Option<u64>,
    /// Moves only memory in this range, such as 16M+4M
    #[arg(long, value_name = "RANGE")]
    range: Option<RangeOf>,
}

/// Returns the API path of a virtual machine's memory.
fn vm_path(vm: &str) -> String {
    format!("/v1/vms/{}/memory", client::segment(vm))
}

/// Runs a command and returns its output.
pub(super) fn answer(client: &Client, form: Form, command: MemoryCommand) -> Result<String, ClientError> {
    match command {
        MemoryCommand::Show { card: None, .. } => {
            let list: api::MemoryList = client.get("/v1/memory")?;
            Ok(form.render(&list, |list| output::memory::cards(&list.memories)))
        }
        MemoryCommand::Show { card: Some(card), .. } => {
            let memory: api::CardMemory = client.get(&format!("/v1/cards/{}/memory", client::segment(&card)))?;
            Ok(form.render(&memory, output::memory::card))
        }
        MemoryCommand::Set(set) => {
            let path = format!("/v1/cards/{}/memory", client::segment(&set.card));
            let memory: api::CardMemory = client.patch(&path, &set.settings.patch())?;
            Ok(form.render(&memory, output::memory::card))
        }
        MemoryCommand::SetQuota(SetSize { vm, size }) => set(client, form, &vm, "quota_mib", json!(size.0)),
        MemoryCommand::SetGuarantee(SetSize { vm, size }) => set(client, form, &vm, "guarantee_mib", json!(size.0)),
        MemoryCommand::SetSwapCap(SetSize { vm, size }) => set(client, form, &vm, "swap_cap_mib", json!(size.0)),
        MemoryCommand::SetRam(SetRam { vm, settings }) => {
            let RamSettings { ram_quota_mib, ram_guarantee_mib, ram_touch_mib } = settings;
            let ram = ram_patch([ram_quota_mib, ram_guarantee_mib, ram_touch_mib]);
            set(client, form, &vm, "ram", ram.unwrap_or_else(|| json!({})))
        }
        MemoryCommand::SetWeight { vm, weight } => set(client, form, &vm, "weight", json!(weight)),
        MemoryCommand::SetPolicy { vm, policy, queue_ms } => {
            let wait = queue_ms.map(|ms| ("queue_ms".to_owned(), json!(ms)));
            let keys = std::iter::once(("on_full".to_owned(), json!(policy.name()))).chain(wait);
            change(client, form, &vm, &keys.collect())
        }
        MemoryCommand::Pin { vm, range } => hint(client, &vm, vec![about(range, |hint| hint.pinned = Some(true))]),
        MemoryCommand::Unpin { vm, range } => hint(client, &vm, vec![about(range, |hint| hint.pinned = Some(false))]),
        MemoryCommand::Priority { vm, range, priority } => {
            hint(client, &vm, vec![about(range, |hint| hint.priority = Some(priority))])
        }
        MemoryCommand::Profile(command) => command.answer(client, form),
        MemoryCommand::Evict(of) => moved(client, form, &of, "evict"),
        MemoryCommand::Return(of) => moved(client, form, &of, "return"),
    }
}

fn set(client: &Client, form: Form, vm: &str, key: &str, value: Value) -> Result<String, ClientError> {
    change(client, form, vm, &Map::from_iter([(key.to_owned(), value)]))
}

fn change(client: &Client, form: Form, vm: &str, patch: &Map<String, Value>) -> Result<String, ClientError> {
    let memory: api::VmMemorySettings = client.patch(&vm_path(vm), patch)?;
    Ok(form.render(&memory, output::memory::limits))
}

fn about(RangeOf(range): RangeOf, say: impl FnOnce(&mut api::Hint)) -> api::Hint {
    let mut hint = api::Hint { range, pinned: None, priority: None, accesses: None };
    say(&mut hint);
    hint
}

fn hint(client: &Client, vm: &str, hints: Vec<api::Hint>) -> Result<String, ClientError> {
    let body = serde_json::to_vec(&api::Hints { hints }).map_err(|error| ClientError::protocol(error.to_string()))?;
    client.request(Method::POST, &format!("{}/hints", vm_path(vm)), body.into())?;
    Ok(String::new())
}

fn moved(client: &Client, form: Form, Move { vm, mib, range }: &Move, what: &str) -> Result<String, ClientError> {
    let request = api::MoveRequest { mib: *mib, range: range.map(|range| range.0) };
    let report: api::MoveReport = client.post(&format!("{}/{what}", vm_path(vm)), &request)?;
    Ok(form.render(&report, output::memory::moved))
}

/// Memory options of `vm add`, `tenant add` and `tenant set`.
#[derive(Clone, Debug, Args)]
pub(super) struct MemoryFlags {
    /// Maximum memory on the card
    #[arg(long, help_heading = "Memory", value_name = "SIZE", value_parser = values::mib)]
    quota_mib: Option<u64>,
    /// Guaranteed memory on the card
    #[arg(long, help_heading = "Memory", value_name = "SIZE", value_parser = values::mib)]
    guarantee_mib: Option<u64>,
    /// Maximum host memory
    #[arg(long, help_heading = "Memory", value_name = "SIZE", value_parser = values::mib)]
    swap_cap_mib: Option<u64>,
    /// Weight for the card's memory while memory is short, relative to the other weights
    #[arg(long, help_heading = "Memory", value_name = "WEIGHT")]
    memory_weight: Option<u32>,
    /// Policy for when the card has no memory left: swap, queue or refuse
    #[arg(long, help_heading = "Memory", value_name = "POLICY")]
    on_full: Option<OnFull>,
    /// With queue: maximum time that work waits for memory before its channel faults, in milliseconds
    #[arg(long, help_heading = "Memory", value_name = "MS")]
    queue_ms: Option<u64>,
    /// Maximum RAM that the virtual machine may lend to the card
    #[arg(long, help_heading = "Memory", value_name = "SIZE", value_parser = values::mib)]
    ram_quota_mib: Option<u64>,
    /// Lent RAM for which bus addresses are reserved
    #[arg(long, help_heading = "Memory", value_name = "SIZE", value_parser = values::mib)]
    ram_guarantee_mib: Option<u64>,
    /// Maximum RAM that the daemon or the card may touch first
    #[arg(long, help_heading = "Memory", value_name = "SIZE", value_parser = values::mib)]
    ram_touch_mib: Option<u64>,
}

impl From<MemoryFlags> for VmMemory {
    fn from(flags: MemoryFlags) -> Self {
        let MemoryFlags {
            quota_mib,
            guarantee_mib,
            swap_cap_mib,
            memory_weight: weight,
            on_full,
            queue_ms,
            ram_quota_mib,
            ram_guarantee_mib,
            ram_touch_mib,
        } = flags;
        let ram = RamSpec { quota_mib: ram_quota_mib, guarantee_mib: ram_guarantee_mib, touch_mib: ram_touch_mib };
        Self { quota_mib, guarantee_mib, swap_cap_mib, weight, on_full, queue_ms, ram }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read_in_all_units() {
        let range = |text: &str| text.parse::<RangeOf>().map(|RangeOf(range)| (range.start, range.bytes));
        assert_eq!(range("16M+4M"), Ok((16 << 20, 4 << 20)));
        assert_eq!(range("0x1000+128K"), Ok((0x1000, 128 << 10)));
        for wrong in ["", "4M", "4M+", "+4M", "a+b", "1T+1", "99999999999G+1"] {
            assert!(range(wrong).unwrap_err().contains("is not a range"), "{wrong}");
        }
    }
}
