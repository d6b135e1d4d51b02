//! Tries to exploit each of the nineteen holes found in the reference code of an earlier GPU mediator, and similar
//! attacks on registers that the reference code does not handle. `docs/design/threat-model.md` lists the holes.
//!
//! Each attempt runs next to two VMs. One of them works, and its copies must stay correct. The other one is idle, and
//! must not even receive an interrupt. After each attempt, [`Scene::check`] checks both VMs and the page tables that
//! the card uses for the attacker, where every entry must map the attacker's own memory. [`Scene::denied`] also
//! requires that the attempt was counted, and [`Scene::virtual_only`] that no register of the card changed.

mod channels;
mod images;
mod kernels;
mod memory;
mod registers;
mod tables;
mod together;
mod windows;
mod written;

use super::{A, B, MIB, VM_MIB, card_vram, finds};
use card::Card;
use nvspec::addr::{GuestVramAddr, LARGE_PAGE};
use nvspec::fifo::VirtualChannelId;
use nvspec::instance::vm;
use nvspec::mmu::{self, PD_ENTRIES, PDE_SHIFT, Pde, Pte, TableTarget, kind};
use nvspec::regs::{blocks, ce0, ce1, ltc, pbdma, pbus, pfb, pfifo, pflush, pgraph, pmc, ptimer};
use nvspec::{Access, RegInfo};
use rig::driver::{At, CE0, CE1, Channel, Driver, M2MF, PAGE, ce_copy, m2mf_copy, object, pattern};
use rig::{CHUNK, Guest, Rig};
use std::collections::{BTreeMap, BTreeSet};
use vram::TenantId;

/// Card memory in MiB: enough for three VMs, the mediator, and shadow tables.
const CARD_MIB: u32 = 96;
/// Size of each VM's VRAM in bytes.
const SHARE_BYTES: u64 = VM_MIB * MIB;
/// Size of each VM's RAM in bytes.
const RAM: u64 = MIB;
const EVIL: TenantId = TenantId(0);
const GOOD: TenantId = TenantId(1);
const IDLE: TenantId = TenantId(2);
/// Byte that fills the idle VM's RAM, and its VRAM from [`SECRET_AT`] to the end.
const SECRET: u8 = 0xc5;
const SECRET_AT: u64 = SHARE_BYTES / 2;
/// Virtual address of the third buffer.
const C: u64 = 0x300_0000;
/// Channel number that the attacker and the other VMs use.
const ID: u8 = 1;

/// The working VM and its channel.
struct Worker {
    driver: Driver,
    channel: Channel,
    from: u64,
    to: u64,
    round: u32,
}

/// The idle VM, and its state at the start.
struct Bystander {
    driver: Driver,
    /// Contents of the idle VM's VRAM below [`SECRET_AT`]: page tables, instance blocks, USERD.
    structures: Vec<u8>,
    interrupts: u64,
}

/// An attacker and its two neighbours on the same card.
struct Scene {
    rig: Rig,
    evil: Driver,
    good: Worker,
    idle: Bystander,
    /// Bus addresses of the working VM's RAM and of the idle VM's RAM.
    bus: [u64; 2],
}

impl Worker {
    fn new(mut driver: Driver) -> Self {
        let channel = driver.channel(ID);
        let from = driver.buffer(&channel, A, 4, 0);
        let to = driver.buffer(&channel, B, 4, 0);
        driver.map(channel.space, C, At::Ram(0), 4);
        Self { driver, channel, from, to, round: 0 }
    }

    /// Copies new data through VRAM and RAM with all three engines, and verifies all bytes.
    fn work(&mut self, after: &str) {
        self.round += 1;
        let Self { driver, channel, from, to, round } = self;
        (0..4).for_each(|page| driver.guest.vram_write(*from + page * PAGE, &pattern(*round, page)));
        (0..4).for_each(|page| driver.guest.vram_write(*to + page * PAGE, &pattern(!*round, page)));
        driver.fill_ram(0, 4, !*round);
        let words = [
            object(CE0),
            ce_copy(A, C, 4),
            object(CE1),
            ce_copy(C, B, 2),
            object(M2MF),
            m2mf_copy(C + 2 * PAGE, B + 2 * PAGE, 2 * PAGE as u32),
        ];
        driver.submit(channel, &words.concat());
        while !driver.is_done(channel) {
            driver.guest.wait_msi();
            driver.service();
            assert_eq!(driver.faults, [], "{after}: the neighbour got a fault");
        }
        assert!(driver.ram_holds(0, 4, *round), "{after}: the neighbour's copy to RAM");
        assert!(driver.vram_holds(*to, 4, *round), "{after}: the neighbour's copy to VRAM");
    }
}

impl Scene {
    fn new() -> Self {
        Self::on(Rig::new(CARD_MIB))
    }

    fn on(rig: Rig) -> Self {
        let evil = born(&rig, EVIL);
        let good = Worker::new(born(&rig, GOOD));
        let mut driver = born(&rig, IDLE);
        let mut channel = driver.channel(ID);
        driver.map(channel.space, C, At::Ram(0), 1);
        driver.submit(&mut channel, &[]);
        driver.wait(&channel);
        let idle = Bystander { driver, structures: Vec::new(), interrupts: 0 };
        let mut scene = Self { rig, evil, good, idle, bus: [0; 2] };
        scene.good.work("the start");
        scene.bus = [scene.bus_address(GOOD), scene.bus_address(IDLE)];
        // Reset the idle VM. When two later interrupts of the working VM have been delivered, all interrupts of the
        // idle VM's earlier work have been delivered, too.
        scene.idle.driver.guest.reset();
        let seen = scene.good.driver.guest.counter("interrupts");
        while scene.good.driver.guest.counter("interrupts") < seen + 2 {
            scene.good.work("the start");
        }
        let idle = &mut scene.idle.driver;
        idle.bring_up();
        idle.channel(ID);
        let secret = vec![SECRET; MIB as usize];
        (SECRET_AT / MIB..VM_MIB).for_each(|mib| idle.guest.vram_write(mib * MIB, &secret));
        idle.guest.ram_write(0, &secret);
        scene.idle.structures = scene.idle_structures();
        scene.idle.interrupts = scene.idle.driver.guest.counter("interrupts");
        scene
    }

    /// Runs an attempt that must fail: it must be denied and counted, or the attacker's work must fault.
    fn denied(&mut self, what: &str, attempt: impl FnOnce(&mut Self)) {
        let before = tally(&self.evil.guest);
        attempt(self);
        assert!(tally(&self.evil.guest) > before, "{what}: the denial was not counted");
        self.check(what);
    }

    /// Runs an attempt that may succeed, but only within the attacker's own memory and state.
    fn contained(&mut self, what: &str, attempt: impl FnOnce(&mut Self)) {
        attempt(self);
        self.check(what);
    }

    /// Runs an attempt whose register writes may change only the attacker's virtual registers.
    fn virtual_only(&mut self, what: &str, attempt: impl FnOnce(&mut Self)) {
        self.settle();
        let before = card_registers(&self.rig);
        attempt(self);
        // The card may report the end of a runlist update or of a channel's removal later.
        self.settle();
        let after = card_registers(&self.rig);
        let changed: Vec<_> = before.iter().filter(|(offset, value)| after.get(offset) != Some(value)).collect();
        assert!(changed.is_empty(), "{what}: the card's registers changed, first {changed:x?}");
        self.check(what);
    }

    /// Waits until the mediator has noticed the completion of all work, and no interrupt is pending. The card writes
    /// completion records only after the fences that drivers read.
    fn settle(&self) {
        let vms = [EVIL, GOOD, IDLE].map(|vm| vm);
        let busy = || {
            let state = self.rig.host.lock();
            let channels = state.channels();
            let ids = || (0..128).map(VirtualChannelId);
            vms.iter().any(|vm| ids().any(|id| channels.in_flight(*vm, id) != 0))
        };
        while busy() || self.rig.card.read32(pmc::INTR_0::OFFSET) != 0 {
            std::thread::yield_now();
        }
    }

    /// Checks that the working VM still works, that the idle VM was not disturbed, and that the card's page tables for
    /// the attacker map only the attacker's memory.
    fn check(&mut self, after: &str) {
        self.good.work(after);
        assert_eq!(tally(&self.good.driver.guest), 0, "{after}: counted for the working neighbour");
        let idle = &mut self.idle.driver.guest;
        assert_eq!(idle.counter("interrupts"), self.idle.interrupts, "{after}: the idle neighbour was interrupted");
        assert_eq!(idle.rd(pfifo::MMU_FAULT_ID::OFFSET), 0, "{after}: the idle neighbour got a fault");
        assert_eq!(tally(idle), 0, "{after}: counted for the idle neighbour");
        for mib in SECRET_AT / MIB..VM_MIB {
            let mut page = [0; PAGE as usize];
            idle.vram_read(mib * MIB, &mut page);
            assert!(page.iter().all(|&byte| byte == SECRET), "{after}: the idle neighbour's MiB {mib}");
        }
        self.check_shadows(after);
    }

    /// Checks all of the idle VM's memory and everything that the attacker can read. Also checks that the attacker can
    /// be removed.
    fn finish(mut self) {
        self.check("the end");
        assert!(self.idle_structures() == self.idle.structures, "the idle neighbour's structures");
        let idle = &self.idle.driver.guest;
        let mut data = vec![0; MIB as usize];
        for mib in SECRET_AT / MIB..VM_MIB {
            idle.vram_read(mib * MIB, &mut data);
            assert!(data.iter().all(|&byte| byte == SECRET), "the idle neighbour's MiB {mib}");
        }
        idle.ram_read(0, &mut data);
        assert!(data.iter().all(|&byte| byte == SECRET), "the idle neighbour's RAM");
        assert_eq!(finds(&self.evil.guest, SECRET), 0, "the attacker's VRAM contains the secret");
        self.evil.guest.ram_read(0, &mut data);
        assert!(
            !data.windows(16).any(|run| run.iter().all(|&byte| byte == SECRET)),
            "the attacker's RAM contains the secret"
        );
        let Self { rig, evil, mut good, .. } = self;
        evil.guest.remove().unwrap();
        assert_eq!(rig.usage().1, 2, "channels of the neighbours");
        good.work("the attacker's end");
    }

    /// Connects a new client to the attacker's VM, whose memory is then zero, and initializes the VM again.
    fn fresh(&mut self) {
        self.evil.guest.reconnect();
        assert!(self.evil.guest.map_ram(0, RAM, true));
        self.evil.bring_up();
    }

    fn idle_structures(&self) -> Vec<u8> {
        let mut data = vec![0; SECRET_AT as usize];
        self.idle.driver.guest.vram_read(0, &mut data);
        data
    }

    /// Returns the card's VRAM address for an address in a VM's VRAM.
    fn on_card(&self, vm: TenantId, at: u64) -> u64 {
        let place = self.rig.host.lock().vram_mut().place(vm, GuestVramAddr(at), PAGE).expect("VRAM of the VM");
        place.card().expect("the chunk is on the card").0
    }

    /// Returns the VRAM address of the card's instance block for a VM's channel, if the channel is bound.
    fn card_instance(&self, vm: TenantId, id: u8) -> Option<u64> {
        let physical = self.rig.host.lock().channels().physical(vm, VirtualChannelId(id))?;
        let value = self.rig.card.read32(pfifo::CHANNEL::at(u32::from(physical.0)));
        Some(u64::from(pfifo::CHANNEL::ADDRESS.get(value)) << 12)
    }

    fn card_word64(&self, at: u64) -> u64 {
        let mut word = [0; 8];
        card_vram(&self.rig, at, &mut word);
        u64::from_le_bytes(word)
    }

    /// Returns the bus address of guest-physical address 0 of a VM, which the VM's channel maps at [`C`].
    fn bus_address(&self, vm: TenantId) -> u64 {
        let directory = self.card_word64(self.card_instance(vm, ID).unwrap() + vm::PDB_LO) & 0xff_ffff_f000;
        let pde = Pde::from(self.card_word64(directory + (C >> PDE_SHIFT) * 8));
        let pte = Pte::from(self.card_word64(pde.small_address() + (C >> 12) * 8));
        assert!(pte.valid() && pte.aperture().is_system(), "{pte:?}");
        pte.address()
    }

    /// Returns VRAM addresses that do not belong to the attacker: the first address beyond its share, addresses of the
    /// neighbours and the mediator, and the ends of the card and of the address space.
    fn outside(&self) -> Vec<(&'static str, u64)> {
        let card = u64::from(CARD_MIB) * MIB;
        let list = vec![
            ("the first page beyond the share", SHARE_BYTES),
            ("the idle VM's memory", self.on_card(IDLE, SECRET_AT)),
            ("the working VM's buffer", self.on_card(GOOD, self.good.from)),
            ("the host's instance block", self.card_instance(GOOD, ID).unwrap()),
            ("the card's last page", card - PAGE),
            ("the first page beyond the card", card),
            ("address 2^32", 1 << 32),
            ("the last page below 2^40", (1 << 40) - PAGE),
        ];
        let list: Vec<_> = list.into_iter().filter(|(_, at)| *at >= SHARE_BYTES).collect();
        assert!(list.iter().any(|(name, _)| *name == "the idle VM's memory"), "the attacker's share covers its number");
        list
    }

    /// Returns RAM addresses that do not belong to the attacker: bus addresses of the other VMs' RAM, and
    /// guest-physical addresses without lent RAM.
    fn foreign_ram(&self) -> Vec<(&'static str, u64)> {
        vec![
            ("the idle VM's RAM", self.bus[1]),
            ("the working VM's RAM", self.bus[0]),
            ("a page beyond its RAM", RAM),
            ("the PCI hole", 0xc000_0000),
            ("the local APIC", 0xfee0_0000),
            ("the BIOS", 0xffff_0000),
            ("the last page below 2^40", (1 << 40) - PAGE),
        ]
    }

    /// Makes a copy engine read or write through a page table entry. The access must fault at exactly the accessed
    /// address.
    fn faults_at(&mut self, what: &str, entry: u64, size: Size, offset: u64, write: bool) {
        let evil = &mut self.evil;
        let mut channel = evil.channel(ID);
        let own = evil.buffer(&channel, A, 1, 0x11);
        match size {
            Size::Small => evil.pte(channel.space, B, entry as u32, (entry >> 32) as u32),
            Size::Large => {
                let table = large_table(evil, &channel);
                evil.guest.poke(table + B / LARGE_PAGE * 8, entry as u32);
                evil.guest.poke(table + B / LARGE_PAGE * 8 + 4, (entry >> 32) as u32);
            }
        }
        evil.flush();
        let (from, to) = if write { (A, B + offset) } else { (B + offset, A) };
        evil.submit(&mut channel, &[object(CE0), ce_copy(from, to, 1)].concat());
        let fault = evil.wait_fault();
        assert_eq!((fault.instance, fault.va), (channel.instance, B + offset), "{what}");
        assert!(evil.vram_holds(own, 1, 0x11), "{what}: data was read");
        evil.unbind(&channel);
        evil.rewind();
    }

    /// Binds a channel and submits work. The bind must be rejected, or the work must fault without any effect.
    fn does_not_run(&mut self, what: &str, channel: &mut Channel) {
        let evil = &mut self.evil;
        let before = stops(&evil.guest);
        evil.bind(channel);
        evil.list(&[ID]);
        evil.submit(channel, &[]);
        wait_stopped(evil, before, what);
        assert!(!evil.is_done(channel), "{what}: the work ran");
        evil.unbind(channel);
        evil.faults.clear();
    }

    /// Checks the card's tables for the attacker's channels. Each entry must map the attacker's own memory without
    /// compression tags or encryption keys, and each table must be in memory that no VM owns.
    fn check_shadows(&self, after: &str) {
        let own = self.blocks_of(&[EVIL]);
        let guests = self.blocks_of(&[EVIL, GOOD, IDLE]);
        for id in 0..=u8::MAX >> 1 {
            let Some(instance) = self.card_instance(EVIL, id) else { continue };
            assert!(!guests.contains(&(instance / CHUNK)), "{after}: a guest has the card's instance block");
            let directory = self.card_word64(instance + vm::PDB_LO);
            assert_eq!(directory & 3, 0, "{after}: directory {directory:#x}");
            let directory = directory & 0xff_ffff_f000;
            assert!(!guests.contains(&(directory / CHUNK)), "{after}: a guest has the card's page directory");
            // The directory's last entry belongs to the mediator.
            for pde in self.entries(directory, PD_ENTRIES - 1) {
                let pde = Pde::from(pde);
                let halves = [
                    (pde.large_target(), pde.large_address(), pde.large_entries(), LARGE_PAGE),
                    (pde.small_target(), pde.small_address(), pde.small_entries(), PAGE),
                ];
                for (target, table, entries, bytes) in halves {
                    if target == TableTarget::None {
                        continue;
                    }
                    let safe = target == TableTarget::Vram && !guests.contains(&(table / CHUNK));
                    assert!(safe, "{after}: the card's page table at {target:?} {table:#x}");
                    for pte in self.entries(table, entries).into_iter().map(Pte::from).filter(|pte| pte.valid()) {
                        let plain = !pte.encrypted() && pte.comp_tag() == 0;
                        assert!(plain && kind::uncompressed(pte.kind()) == Some(pte.kind()), "{after}: {pte:?}");
                        let (at, end) = (pte.address(), pte.address() + bytes);
                        let mine = match pte.aperture() {
                            mmu::PteAperture::Vram => own.contains(&(at / CHUNK)) && own.contains(&((end - 1) / CHUNK)),
                            mmu::PteAperture::Peer => false,
                            _ => self.bus.iter().all(|other| end <= *other || *other + RAM <= at),
                        };
                        assert!(mine, "{after}: the card's entry {pte:?}");
                    }
                }
            }
        }
    }

    fn entries(&self, table: u64, count: u32) -> Vec<u64> {
        let mut bytes = vec![0; count as usize * 8];
        card_vram(&self.rig, table, &mut bytes);
        bytes.as_chunks().0.iter().map(|entry| u64::from_le_bytes(*entry)).collect()
    }

    /// Returns the numbers of the card chunks that these VMs own.
    fn blocks_of(&self, vms: &[TenantId]) -> BTreeSet<u64> {
        let all =
            vms.iter().flat_map(|vm| (0..SHARE_BYTES / CHUNK).map(|chunk| self.on_card(*vm, chunk * CHUNK) / CHUNK));
        all.collect()
    }
}

/// Page size of a table's entries.
#[derive(Clone, Copy)]
enum Size {
    Small,
    Large,
}

fn born(rig: &Rig, vm: TenantId) -> Driver {
    let mut guest = rig.guest(vm.0, VM_MIB, 16);
    assert!(guest.map_ram(0, RAM, true));
    Driver::new(guest)
}

/// Installs a large-page table for the first 128 MiB of a channel's address space. Returns the table's address.
fn large_table(driver: &mut Driver, channel: &Channel) -> u64 {
    let table = driver.vram(2);
    driver.guest.poke(channel.space.directory, ((table >> 12) << 4) as u32 | 1);
    table
}

/// Returns a valid page table entry. `aperture` is 0 for VRAM, 1 for another card, and 2 or 3 for host memory.
fn entry(at: u64, aperture: u64) -> u64 {
    (at >> 8) & 0xffff_fff0 | aperture << 33 | 1
}

/// Returns the sum of all counters of a guest's denials and faults.
fn tally(guest: &Guest) -> u64 {
    let denied: u64 = guest.status().denied.iter().map(|denied| denied.reads + denied.writes).sum();
    denied + stops(guest)
}

/// Returns how often a guest's work was stopped or not started: the sum of its faults, rejected channels, and rejected
/// doorbells.
fn stops(guest: &Guest) -> u64 {
    let status = guest.status();
    let counted =
        ["faults", "channel_binds_refused", "doorbells_refused"].map(|name| status.counters.get(name).copied());
    counted.into_iter().flatten().sum()
}

/// Waits for interrupts until [`stops`] exceeds `before` or the guest has read an engine error. Waits for the fault
/// even if a denial was counted, because the card stores only one fault per unit, and a second one could be lost.
fn wait_stopped(driver: &mut Driver, before: u64, what: &str) {
    for _ in 0..100 {
        let errors = [pgraph::INTR::OFFSET, ce0::INTR::OFFSET, ce1::INTR::OFFSET];
        if stops(&driver.guest) > before || errors.into_iter().any(|register| driver.guest.rd(register) != 0) {
            return;
        }
        driver.guest.wait_msi();
        driver.service();
    }
    panic!("{what}: neither rejected nor faulted");
}

/// Returns the values of the card's own registers. Excludes clocks, registers that the mediator uses on each access,
/// registers that change when they are read, and registers that show running channels or pending interrupts (the
/// neighbour's last interrupt may still be pending).
fn card_registers(rig: &Rig) -> BTreeMap<u32, u32> {
    let passing = [
        pbus::PRAMIN_WINDOW::OFFSET,
        ptimer::TIME_0::OFFSET,
        ptimer::TIME_1::OFFSET,
        pflush::BAR_FLUSH::OFFSET,
        pfb::MMU_INVALIDATE_PDB::OFFSET,
        pfb::MMU_INVALIDATE::OFFSET,
        pfb::MMU_CTRL::OFFSET,
        pfifo::RUNLIST_BASE::OFFSET,
        pfifo::RUNLIST::OFFSET,
        pfifo::ENG_RUNLIST_BASE::OFFSET,
        pfifo::ENG_RUNLIST::OFFSET,
        pfifo::CHANNEL_STATE::OFFSET,
        pbdma::CHANNEL::OFFSET,
        pmc::INTR_0::OFFSET,
        pmc::INTR_LINE_0::OFFSET,
        pfifo::NON_STALL_ID::OFFSET,
    ];
    let quiet = |reg: &&RegInfo| {
        matches!(reg.access, Access::Rw | Access::Ro) && !reg.name.ends_with("_DATA") && !passing.contains(&reg.offset)
    };
    let registers = blocks().flat_map(|(_, _, _, info)| *info).filter(quiet);
    let offsets = registers.flat_map(|reg| (0..reg.count).map(|index| reg.offset + index * reg.stride));
    offsets.map(|offset| (offset, rig.card.read32(offset))).collect()
}
