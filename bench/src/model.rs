//! Model of the time that a guest's operations take on a real host: the sum of count times cost over all operation
//! types.
//!
//! Guests are emulated here and the card is software, so measured times say little about a host with KVM and a real
//! card. The guest's operations are the same on both, because accesses, calls, flushes and interrupts depend only on
//! the guest's driver. This file contains the operations that each platform incurs and the cost of each operation. A
//! cost is a range from public sources or from measurements of this project's software.
//!
//! Costs that cannot be counted and are the same on all platforms are omitted: the guest's own CPU time, and the run
//! time of kernels. The ratio of two platforms is therefore farther from 1 than the ratio of total times. The range of
//! a ratio spans its minimum and maximum over all choices of costs within their ranges, with the same choice for both
//! platforms.

use crate::report::Interval;

/// An operation with a cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Item {
    /// Read of a card register or aperture. The guest waits for it.
    Read,
    /// Posted write to a card register or aperture.
    Write,
    /// Exit from the guest to its VMM for an access, and the return.
    Exit,
    /// Message that the VMM sends without waiting.
    Post,
    /// Message for which the VMM waits for a reply.
    RoundTrip,
    /// Card interrupt that the host forwards to a guest.
    Relay,
    /// Card interrupt that the mediator forwards after determining the target VM.
    Wake,
    /// The mediator's own work for a register access.
    Register,
    /// The mediator's own work for a VRAM access through an aperture.
    Aperture,
    /// The mediator's own work for a doorbell.
    Doorbell,
    /// The mediator's own work for a TLB flush, excluding table reads.
    Flush,
    /// Reading page tables for a flush, per KiB.
    Scan,
    /// The mediator's own work for a call, excluding its operations.
    Call,
    /// The mediator's own work for one operation of a call.
    Operation,
    /// Copying by the guest's CPU, per KiB.
    CpuKib,
    /// Copying by the card's engines between host memory and card memory, per KiB.
    LinkKib,
    /// Transfers by kernels within the card's memory, per KiB.
    VramKib,
}

/// Cost of an operation, in us.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(
    not(test),
    expect(dead_code, reason = "tests compare some fields with the order of items and with the page")
)]
pub struct Cost {
    /// Operation with this cost.
    pub item: Item,
    /// Name in reports.
    pub name: &'static str,
    /// Minimum, typical and maximum cost in us.
    pub us: [f64; 3],
    /// Source of the range.
    pub source: &'static str,
}

/// Number of cost items.
const ITEMS: usize = 17;

const OWN: &str = "measured by `bench costs`, which reports a value outside the range";

/// Cost of each operation, in the order of [`Item`].
#[rustfmt::skip]
pub const COSTS: [Cost; ITEMS] = [
    Cost { item: Item::Read, name: "card_read", us: [0.5, 0.8, 1.2],
        source: "PCIe round trip of a read that is not posted: 0.5 to 1 us on usual hosts" },
    Cost { item: Item::Write, name: "card_write", us: [0.05, 0.1, 0.3],
        source: "interval between uncached stores on PCIe: 50 to 300 ns (Intel's forum on software tuning, thread 1186313)" },
    Cost { item: Item::Exit, name: "exit", us: [1.5, 2.0, 3.0],
        source: "KVM_RUN from entry to exit 2,528 cycles (LKML 2020-12, vmsave and vmload), decoding of the access, and QEMU's dispatch" },
    Cost { item: Item::Post, name: "posted_message", us: [0.5, 1.0, 2.0],
        source: "estimate: one sendmsg on a UNIX socket to a process that is awake" },
    Cost { item: Item::RoundTrip, name: "message_round_trip", us: [3.0, 5.0, 10.0],
        source: "estimate: there and back on a UNIX socket, with one wake-up to two; the server spins before it sleeps" },
    Cost { item: Item::Relay, name: "interrupt_relayed", us: [1.0, 2.0, 5.0],
        source: "estimate: VFIO's handler, an eventfd and KVM's injection; less with posted interrupts" },
    Cost { item: Item::Wake, name: "interrupt_looked_at", us: [3.0, 6.0, 12.0],
        source: "estimate: wake-up of the mediator's interrupt thread by an eventfd; its reads of the card's interrupt tree are counted apart" },
    Cost { item: Item::Register, name: "register_access", us: [0.02, 0.1, 0.5], source: OWN },
    Cost { item: Item::Aperture, name: "aperture_access", us: [0.05, 0.2, 1.0], source: OWN },
    Cost { item: Item::Doorbell, name: "doorbell", us: [1.0, 5.0, 15.0], source: OWN },
    Cost { item: Item::Flush, name: "flush", us: [0.2, 1.0, 5.0], source: OWN },
    Cost { item: Item::Scan, name: "table_kib_read", us: [0.05, 0.1, 0.3], source: OWN },
    Cost { item: Item::Call, name: "call", us: [0.5, 2.0, 8.0], source: OWN },
    Cost { item: Item::Operation, name: "operation", us: [0.02, 0.1, 1.0], source: OWN },
    Cost { item: Item::CpuKib, name: "cpu_kib", us: [0.1, 0.2, 0.33],
        source: "memcpy of one core between buffers that no cache holds: 3 to 10 GB/s" },
    Cost { item: Item::LinkKib, name: "link_kib", us: [0.08, 0.17, 0.25],
        source: "PCIe 2.0 x16, as the papers' cards have it: 4 to 6 GB/s; 12 GB/s for 3.0" },
    Cost { item: Item::VramKib, name: "vram_kib", us: [0.005, 0.007, 0.012],
        source: "GDDR5 of the Quadro 6000: 144 GB/s, of which kernels reach 60 to 100 %; more on later cards" },
];

/// Numbers of card register reads and writes by the mediator per doorbell.
const DOORBELL_ACCESSES: [f64; 2] = [5.0, 4.0];
/// Numbers of card register reads and writes per flush.
const FLUSH_ACCESSES: [f64; 2] = [1.0, 2.0];
/// Number of card register reads per interrupt.
const INTERRUPT_READS: f64 = 3.0;

macro_rules! quantities {
    ($($(#[$doc:meta])+ $field:ident: $counter:literal,)*) => {
        /// Counts of a guest's operations in a period.
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        pub struct Counts {
            $($(#[$doc])+ pub $field: f64,)*
        }

        impl Counts {
            /// Reads each count with `read`, which gets the name of the daemon's counter.
            #[must_use]
            pub fn from_counters(read: impl Fn(&str) -> f64) -> Self {
                Self { $($field: read($counter),)* }
            }

            /// Returns all counts, by name.
            #[must_use]
            pub fn named(&self) -> Vec<(&'static str, f64)> {
                vec![$((stringify!($field), self.$field)),*]
            }

            /// Returns the sums of these counts and those of `other`.
            #[must_use]
            pub fn plus(&self, other: &Self) -> Self {
                Self { $($field: self.$field + other.$field,)* }
            }

            /// Returns these counts times `factor`.
            #[must_use]
            pub fn times(&self, factor: f64) -> Self {
                Self { $($field: self.$field * factor,)* }
            }
        }
    };
}

quantities! {
    /// Register reads, including PRAMIN reads.
    register_reads: "register_reads",
    /// Register writes, including PRAMIN writes.
    register_writes: "register_writes",
    /// Reads through BAR1 and BAR3, except for reads of memory that the guest accesses directly.
    aperture_reads: "aperture_reads",
    /// Writes through BAR1 and BAR3, except for writes to memory that the guest accesses directly.
    aperture_writes: "aperture_writes",
    /// Number of VRAM bytes that the guest's CPU accessed with aperture reads and writes, or through PRAMIN.
    aperture_bytes: "aperture_bytes",
    /// Number of card memory words (up to 8 bytes each) that the mediator's CPU read for the guest: for its accesses,
    /// its page tables, and pages mapped under its apertures.
    vram_words_read: "vram_words_read",
    /// Number of card memory words (up to 8 bytes each) that the mediator's CPU wrote for the guest: for its accesses,
    /// its page tables, and pages mapped under its apertures.
    vram_words_written: "vram_words_written",
    /// Interrupts sent to the guest.
    interrupts: "interrupts",
    /// Number of doorbells.
    doorbells: "doorbells",
    /// TLB flushes by the guest.
    flushes: "tlb_flushes",
    /// Updates of shadow page tables.
    shadow_updates: "shadow_syncs",
    /// Number of guest page table bytes read for shadow updates.
    bytes_scanned: "shadow_bytes_scanned",
    /// Number of page table entries written for the card.
    entries_written: "shadow_entries_written",
    /// Number of calls.
    calls: "pv_batches",
    /// Number of operations in the calls.
    operations: "pv_operations",
    /// Number of page table entries in the calls.
    entries: "pv_entries",
    /// Number of bytes that the guest's CPU copied to or from buffers of the card.
    cpu_bytes: "",
    /// Number of bytes that the card copied between host memory and its own memory.
    link_bytes: "",
    /// Number of bytes that kernels transferred within card memory, where known.
    vram_bytes: "",
}

impl Counts {
    /// Returns the difference from the earlier counts `before`.
    #[must_use]
    pub fn minus(&self, before: &Self) -> Self {
        self.plus(&before.times(-1.0))
    }
}

/// The way in which a guest uses a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Platform {
    /// The driver runs directly on the host.
    Native,
    /// The card's BARs are mapped into a VM.
    Passthrough,
    /// Accesses of a VM are messages to the mediator.
    Mediated {
        /// True if the VM does not wait for writes.
        posted: bool,
    },
}

/// Number of operations of each type that a platform incurs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Bill([f64; ITEMS]);

impl Bill {
    /// Returns the operations that a platform incurs for a guest's operations. For [`Platform::Native`], pass the
    /// counts of a guest whose accesses are all counted. The result is then the cost of its driver on the host.
    #[must_use]
    pub fn for_counts(platform: Platform, counts: &Counts) -> Self {
        let mut bill = Self::default();
        let Counts { register_reads, register_writes, aperture_reads, aperture_writes, interrupts, .. } = *counts;
        let (reads, writes) = (register_reads + aperture_reads, register_writes + aperture_writes);
        bill.add(Item::CpuKib, counts.cpu_bytes / 1024.0);
        bill.add(Item::LinkKib, counts.link_bytes / 1024.0);
        bill.add(Item::VramKib, counts.vram_bytes / 1024.0);
        match platform {
            Platform::Native | Platform::Passthrough => {
                bill.add(Item::Read, reads);
                bill.add(Item::Write, writes);
                bill.add(Item::Relay, if platform == Platform::Native { 0.0 } else { interrupts });
            }
            Platform::Mediated { posted } => {
                bill.add(Item::Exit, reads + writes);
                bill.add(Item::RoundTrip, reads);
                bill.add(if posted { Item::Post } else { Item::RoundTrip }, writes);
                bill.add(Item::Register, register_reads + register_writes);
                bill.add(Item::Aperture, aperture_reads + aperture_writes);
                bill.add(Item::Read, counts.vram_words_read);
                bill.add(Item::Write, counts.vram_words_written);
                bill.accesses(DOORBELL_ACCESSES, counts.doorbells);
                bill.add(Item::Doorbell, counts.doorbells);
                bill.accesses(FLUSH_ACCESSES, counts.flushes);
                bill.add(Item::Flush, counts.flushes);
                bill.add(Item::Scan, counts.bytes_scanned / 1024.0);
                bill.add(Item::Write, counts.entries_written);
                bill.add(Item::Relay, interrupts);
                bill.add(Item::Wake, interrupts);
                bill.add(Item::Read, INTERRUPT_READS * interrupts);
                bill.add(Item::Call, counts.calls);
                bill.add(Item::Operation, counts.operations);
            }
        }
        bill
    }

    fn add(&mut self, item: Item, count: f64) {
        self.0[item as usize] += count;
    }

    fn accesses(&mut self, [reads, writes]: [f64; 2], times: f64) {
        self.add(Item::Read, reads * times);
        self.add(Item::Write, writes * times);
    }

    /// Returns the time in us at typical costs.
    #[must_use]
    pub fn us(&self) -> f64 {
        self.at(|cost| cost.us[1])
    }

    fn at(&self, of: impl Fn(&Cost) -> f64) -> f64 {
        self.0.iter().zip(&COSTS).map(|(count, cost)| count * of(cost)).sum()
    }

    /// Returns the range of the ratio of this bill to `base` over all choices of costs. `common` is an additional cost
    /// of both platforms in us.
    ///
    /// The ratio of two sums is monotonic in each cost, so, at the extremes of the ratio, every cost is at a bound of
    /// its range.
    #[must_use]
    pub fn ratio(&self, base: &Self, common: f64) -> Interval {
        let differing: Vec<usize> = (0..ITEMS).filter(|&at| self.0[at] != 0.0 || base.0[at] != 0.0).collect();
        let mut ends = Interval { low: f64::INFINITY, high: f64::NEG_INFINITY };
        for choice in 0..1u32 << differing.len() {
            let mut times = [common; 2];
            for (bit, &at) in differing.iter().enumerate() {
                let us = COSTS[at].us[if choice >> bit & 1 == 0 { 0 } else { 2 }];
                times[0] += self.0[at] * us;
                times[1] += base.0[at] * us;
            }
            if times[1] > 0.0 {
                let ratio = times[0] / times[1];
                ends = Interval { low: ends.low.min(ratio), high: ends.high.max(ratio) };
            }
        }
        ends
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    const WORK: Counts = Counts {
        register_reads: 10.0,
        register_writes: 20.0,
        aperture_reads: 2.0,
        aperture_writes: 100.0,
        aperture_bytes: 408.0,
        vram_words_read: 2.0,
        vram_words_written: 100.0,
        interrupts: 3.0,
        doorbells: 4.0,
        flushes: 5.0,
        bytes_scanned: 8192.0,
        entries_written: 7.0,
        shadow_updates: 0.0,
        calls: 0.0,
        operations: 0.0,
        entries: 0.0,
        cpu_bytes: 0.0,
        link_bytes: 0.0,
        vram_bytes: 0.0,
    };

    #[test]
    fn costs_are_in_item_order_with_valid_ranges() {
        for (at, cost) in COSTS.iter().enumerate() {
            assert_eq!(cost.item as usize, at, "{}", cost.name);
            let [low, usual, high] = cost.us;
            assert!(0.0 < low && low <= usual && usual <= high && !cost.source.is_empty(), "{}", cost.name);
        }
    }

    #[test]
    fn native_pays_the_card_alone_and_passthrough_its_interrupts() {
        let native = Bill::for_counts(Platform::Native, &WORK).us();
        assert!((native - (12.0 * 0.8 + 120.0 * 0.1)).abs() < 1e-9, "{native}");
        let passthrough = Bill::for_counts(Platform::Passthrough, &WORK).us();
        assert!((passthrough - native - 3.0 * 2.0).abs() < 1e-9, "{passthrough}");
    }

    #[test]
    fn each_thing_that_a_mediated_guest_does_costs_it_something() {
        let posted = Bill::for_counts(Platform::Mediated { posted: true }, &WORK).us();
        assert!(posted > Bill::for_counts(Platform::Passthrough, &WORK).us());
        assert!(Bill::for_counts(Platform::Mediated { posted: false }, &WORK).us() > posted);
        let more = |change: fn(&mut Counts)| {
            let mut counts = WORK;
            change(&mut counts);
            Bill::for_counts(Platform::Mediated { posted: true }, &counts).us()
        };
        let changes: [fn(&mut Counts); 16] = [
            |counts| counts.register_reads += 1.0,
            |counts| counts.register_writes += 1.0,
            |counts| counts.aperture_reads += 1.0,
            |counts| counts.aperture_writes += 1.0,
            |counts| counts.vram_words_read += 1.0,
            |counts| counts.vram_words_written += 1.0,
            |counts| counts.interrupts += 1.0,
            |counts| counts.doorbells += 1.0,
            |counts| counts.flushes += 1.0,
            |counts| counts.bytes_scanned += 1024.0,
            |counts| counts.entries_written += 1.0,
            |counts| counts.calls += 1.0,
            |counts| counts.operations += 1.0,
            |counts| counts.cpu_bytes += 1024.0,
            |counts| counts.link_bytes += 1024.0,
            |counts| counts.vram_bytes += 1024.0,
        ];
        for (at, change) in changes.into_iter().enumerate() {
            assert!(more(change) > posted, "change {at}");
        }
    }

    #[test]
    fn ratio_range_contains_usual_and_shrinks_with_shared_costs() {
        let (native, mediated) =
            (Bill::for_counts(Platform::Native, &WORK), Bill::for_counts(Platform::Mediated { posted: true }, &WORK));
        let Interval { low, high } = mediated.ratio(&native, 0.0);
        let usual = mediated.us() / native.us();
        assert!(low < usual && usual < high, "{low} {usual} {high}");
        let closer = mediated.ratio(&native, 1e4).high;
        assert!(1.0 < closer && closer < high, "{closer}");
        assert_eq!(native.ratio(&native, 0.0), Interval { low: 1.0, high: 1.0 });
    }

    #[test]
    fn counts_are_those_of_the_daemon_by_its_names() {
        let read = |counter: &str| match counter {
            "pv_batches" => 3.0,
            "tlb_flushes" => 2.0,
            _ => 0.0,
        };
        let counts = Counts::from_counters(read);
        assert_eq!((counts.calls, counts.flushes, counts.doorbells), (3.0, 2.0, 0.0));
        assert_eq!(counts.minus(&counts), Counts::default());
        assert_eq!(counts.times(2.0), counts.plus(&counts));
        assert!(counts.named().contains(&("calls", 3.0)));
    }
    #[test]
    fn cost_model_page_lists_every_cost() {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/design/cost-model.md");
        let page = fs::read_to_string(page).unwrap();
        for Cost { name, us: [low, usual, high], source, .. } in COSTS {
            let row = format!("| `{name}` | {low} | {usual} | {high} | {source} |");
            assert!(page.contains(&row), "cost-model.md has no row {row}");
        }
    }
}
