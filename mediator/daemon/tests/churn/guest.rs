//! A small guest that repeatedly connects, works and disconnects.

use std::cell::RefCell;
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::thread;

use config::{Apertures, VmSpec};
use mediatorctl::client::Client;
use nvspec::regs::pfifo;
use rig::driver::{At, CE0, CE1, Channel, Driver as AnyDriver, M2MF, PAGE, ce_copy, m2mf_copy, object, pattern};
use rig::{Machine, RemoteGuest, read_file};

use crate::{Crowd, MAX_CHANNELS_PER_VM, VM_MIB, until_told};

type Driver = AnyDriver<RemoteGuest>;

const MIB: u64 = 1 << 20;
/// Size of the guest RAM's first region, in bytes.
const RAM: u64 = MIB;
/// Address and size of the guest RAM's second region, in bytes. The VMM withdraws this region while the card uses it.
const MORE_RAM: (u64, u64) = (16 * MIB, MIB);
/// Buffer size in pages.
const PAGES: u64 = 4;
/// Virtual address of the first source. There are only [`SLOTS`] sources and targets, so most addresses are reused.
const FROM: u64 = 0x100_0000;
const TO: u64 = 0x200_0000;
const SLOTS: u64 = 3;
const SLOT: u64 = 0x1_0000;
/// VRAM needed for a new channel and its buffers, in bytes.
const CHANNEL_ROOM: u64 = MIB;

/// Ways in which a guest instance exits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Exit {
    /// The guest withdraws lent memory, and disconnects.
    Orderly,
    /// The guest's socket is closed while the card is working for the guest.
    Dropped,
    /// The guest withdraws memory that the card is using, and disconnects.
    Unmapped,
    /// An operator removes the VM while the guest is working.
    Removed,
    /// The device is reset while the guest is working. The guest then restarts, and disconnects.
    Reset,
}

impl Exit {
    const ALL: [Self; 5] = [Self::Orderly, Self::Dropped, Self::Unmapped, Self::Removed, Self::Reset];
}

/// Counts of the guests' actions.
#[derive(Clone, Copy, Default)]
pub struct Tally {
    lives: u64,
    copies: u64,
    bytes: u64,
    faults: u64,
    refused: u64,
    exits: [u64; Exit::ALL.len()],
}

impl Tally {
    pub fn add(&mut self, other: &Self) {
        self.lives += other.lives;
        self.copies += other.copies;
        self.bytes += other.bytes;
        self.faults += other.faults;
        self.refused += other.refused;
        self.exits.iter_mut().zip(other.exits).for_each(|(sum, count)| *sum += count);
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { lives, copies, bytes, faults, refused, .. } = self;
        let exits = Exit::ALL.iter().zip(self.exits).map(|(exit, count)| format!("{exit:?} {count}"));
        write!(
            f,
            "{lives} lives ({}), {copies} copies of {} KiB verified, {faults} expected faults and {refused} channels rejected as expected",
            exits.collect::<Vec<_>>().join(", "),
            bytes >> 10,
        )
    }
}

/// A channel, with its source and target pages in VRAM.
struct Lane {
    channel: Channel,
    vram: [u64; 2],
}

/// A guest in a VM.
pub struct Guest<'a> {
    crowd: &'a Crowd<'a>,
    admin: Client,
    name: String,
    random: fastrand::Rng,
    pub tally: Tally,
}

impl<'a> Guest<'a> {
    pub fn new(crowd: &'a Crowd<'a>, number: usize, seed: u64) -> Self {
        let admin = Client::new(crowd.place.path("admin.sock")).unwrap();
        let random = fastrand::Rng::with_seed(seed << 32 | number as u64);
        Self { crowd, admin, name: format!("guest{number}"), random, tally: Tally::default() }
    }

    fn socket(&self) -> PathBuf {
        self.crowd.place.path(&format!("{}.sock", self.name))
    }

    fn url(&self) -> String {
        format!("/v1/vms/{}", self.name)
    }

    fn show(&self) -> api::Vm {
        self.admin.get(&self.url()).unwrap()
    }

    /// Runs one instance, from the creation of the VM to its removal. Returns false if the time is up.
    pub fn live(&mut self) -> bool {
        // A busy host must not make a channel appear hung. This driver is slow: it writes its page tables word by word,
        // and moves its window before each word.
        let spec = VmSpec {
            channels: Some(MAX_CHANNELS_PER_VM),
            hang_limit_ms: Some(600_000),
            apertures: Apertures::Trapped,
            ..VmSpec::new(&self.name, "card0", VM_MIB)
        };
        let _: api::Vm = self.admin.post("/v1/vms", &spec).unwrap();
        let mut driver = self.born();
        let mut lanes = vec![self.lane(&mut driver, 0)];
        self.copy(&mut driver, &mut lanes[0]);
        if self.tally.lives == 0 {
            self.crowd.meet();
        }
        self.tally.lives += 1;
        for _ in 0..self.random.u64(..12) {
            self.work(&mut driver, &mut lanes);
        }
        let exit = Exit::ALL[self.random.usize(..Exit::ALL.len())];
        self.tally.exits[exit as usize] += 1;
        self.leave(driver, lanes, exit);
        assert!(!self.socket().exists(), "the socket of a VM that was removed");
        !self.crowd.is_over()
    }

    /// Connects, initializes the vGPU, and checks that random pages of its memory are zeroed.
    fn born(&mut self) -> Driver {
        let mut guest = RemoteGuest::connect(&self.socket(), VM_MIB * MIB).unwrap();
        assert!(guest.map_ram(0, RAM, true) && guest.map_ram(MORE_RAM.0, MORE_RAM.1, true));
        let mut page = [0; PAGE as usize];
        for _ in 0..4 {
            let at = self.random.u64(..VM_MIB * MIB / PAGE) * PAGE;
            guest.vram_read(at, &mut page);
            assert_eq!(page, [0; PAGE as usize], "VRAM at {at:#x} of a new VM");
        }
        Driver::new(guest)
    }

    /// Creates a channel with its buffers.
    fn lane(&mut self, driver: &mut Driver, id: u8) -> Lane {
        let channel = driver.channel(id);
        Lane { channel, vram: [driver.vram(PAGES), driver.vram(PAGES)] }
    }

    /// Performs a random driver action.
    fn work(&mut self, driver: &mut Driver, lanes: &mut Vec<Lane>) {
        let lane = self.random.usize(..lanes.len());
        match self.random.u64(..10) {
            0..6 => self.copy(driver, &mut lanes[lane]),
            6 => self.remap(driver, &mut lanes[lane]),
            7 => {
                self.stray(driver, &mut lanes[lane]);
                let Lane { channel, .. } = lanes.swap_remove(lane);
                driver.unbind(&channel);
                driver.submit_runlist();
                let new = self.lane(driver, channel.id);
                lanes.push(new);
            }
            8 => self.exceed(driver, lanes),
            _ if lanes.len() < MAX_CHANNELS_PER_VM as usize && driver.room() > 4 * CHANNEL_ROOM => {
                let new = self.lane(driver, lanes.len() as u8);
                lanes.push(new);
            }
            _ => {
                driver.flush();
                driver.service();
            }
        }
    }

    /// Copies between two buffers in RAM or VRAM with one engine, at virtual addresses that were often mapped to other
    /// memory before.
    fn copy(&mut self, driver: &mut Driver, lane: &mut Lane) {
        let (from, to) = (self.place(lane, 0), self.place(lane, 1));
        let pages = 1 + self.random.u64(..PAGES);
        let from_va = FROM + SLOT * self.random.u64(..SLOTS);
        let to_va = TO + SLOT * self.random.u64(..SLOTS);
        driver.map(lane.channel.space, from_va, from, pages);
        driver.map(lane.channel.space, to_va, to, pages);
        let words = self.words(from_va, to_va, pages);
        self.verified(driver, lane, from, to, pages, &words);
    }

    /// Maps a virtual address to several pages, one after the other, and copies to each of them.
    fn remap(&mut self, driver: &mut Driver, lane: &mut Lane) {
        let from = self.place(lane, 0);
        driver.map(lane.channel.space, FROM, from, 1);
        for _ in 0..1 + self.random.u64(..6) {
            let to = match self.place(lane, 1) {
                At::Vram(at) => At::Vram(at + PAGE * self.random.u64(..PAGES)),
                At::Ram(at) => At::Ram(at + PAGE * self.random.u64(..PAGES)),
            };
            driver.map(lane.channel.space, TO, to, 1);
            let words = self.words(FROM, TO, 1);
            self.verified(driver, lane, from, to, 1, &words);
            driver.pte(lane.channel.space, TO, 0, 0);
            driver.flush();
        }
    }

    /// Copies to an address that is no longer mapped. The copy must fault before it writes data.
    fn stray(&mut self, driver: &mut Driver, lane: &mut Lane) {
        let to = self.place(lane, 1);
        self.copy(driver, lane);
        driver.map(lane.channel.space, FROM, At::Vram(lane.vram[0]), 1);
        driver.map(lane.channel.space, TO, to, 1);
        driver.pte(lane.channel.space, TO, 0, 0);
        driver.flush();
        let seed = self.random.u32(..);
        fill(driver, At::Vram(lane.vram[0]), 1, seed);
        fill(driver, to, 1, !seed);
        let words = self.words(FROM, TO, 1);
        driver.submit(&mut lane.channel, &words);
        let fault = driver.wait_fault();
        assert_eq!((fault.instance, fault.va), (lane.channel.instance, TO));
        assert!(holds(driver, to, 1, !seed), "an unmapped page was written");
        self.tally.faults += 1;
    }

    /// Binds channels up to the limit, and then one more.
    fn exceed(&mut self, driver: &mut Driver, lanes: &mut Vec<Lane>) {
        while lanes.len() < MAX_CHANNELS_PER_VM as usize && driver.room() > 4 * CHANNEL_ROOM {
            let new = self.lane(driver, lanes.len() as u8);
            lanes.push(new);
        }
        if lanes.len() < MAX_CHANNELS_PER_VM as usize || driver.room() < CHANNEL_ROOM {
            return;
        }
        assert!(driver.guest.settle());
        let before = self.show();
        let beyond = driver.prepare(MAX_CHANNELS_PER_VM as u8);
        driver.bind(&beyond);
        driver.ring(&beyond, 1);
        assert!(driver.guest.settle());
        let after = self.show();
        assert_eq!(
            (before.channels_used, after.channels_used),
            (MAX_CHANNELS_PER_VM, MAX_CHANNELS_PER_VM),
            "channels of a VM that may have {MAX_CHANNELS_PER_VM}"
        );
        let refused = |vm: &api::Vm| vm.counters["channel_binds_refused"];
        assert_eq!(refused(&after), refused(&before) + 1, "the excess channel is rejected");
        // Work on the excess channel faults.
        assert_eq!(driver.wait_fault().instance, beyond.instance);
        driver.guest.wr(pfifo::CHANNEL::at(beyond.id.into()), 0);
        self.tally.refused += 1;
        let lane = self.random.usize(..lanes.len());
        self.copy(driver, &mut lanes[lane]);
    }

    /// Returns the location of a channel's buffer 0 or 1, chosen at random in VRAM or RAM.
    fn place(&mut self, lane: &Lane, which: usize) -> At {
        let own = u64::from(lane.channel.id) * 2 + which as u64;
        match self.random.u64(..3) {
            0 => At::Vram(lane.vram[which]),
            1 => At::Ram(own * PAGES * PAGE),
            _ => At::Ram(MORE_RAM.0 + own * PAGES * PAGE),
        }
    }

    fn words(&mut self, from: u64, to: u64, pages: u64) -> Vec<u32> {
        match self.random.u64(..3) {
            0 => [object(M2MF), m2mf_copy(from, to, (pages * PAGE) as u32)].concat(),
            1 => [object(CE0), ce_copy(from, to, pages as u32)].concat(),
            _ => [object(CE1), ce_copy(from, to, pages as u32)].concat(),
        }
    }

    /// Submits a copy, and verifies the result unless the VM has been removed in the meantime.
    fn verified(&mut self, driver: &mut Driver, lane: &mut Lane, from: At, to: At, pages: u64, words: &[u32]) {
        let seed = self.random.u32(..);
        fill(driver, from, pages, seed);
        fill(driver, to, pages, !seed);
        driver.submit(&mut lane.channel, words);
        driver.wait(&lane.channel);
        let good = holds(driver, to, pages, seed);
        if driver.guest.is_there() {
            assert!(good, "{}: {pages} pages from {from:?} to {to:?}, channel {}", self.name, lane.channel.id);
            assert_eq!(driver.faults, []);
            self.tally.copies += 1;
            self.tally.bytes += pages * PAGE;
        }
    }

    /// Submits more work to a channel than can be in flight, with targets in VRAM and in RAM that may be withdrawn.
    fn load(&mut self, driver: &mut Driver, lane: &mut Lane) {
        let [from, to] = lane.vram;
        driver.map(lane.channel.space, FROM, At::Vram(from), PAGES);
        driver.map(lane.channel.space, TO, At::Vram(to), PAGES);
        driver.map(lane.channel.space, TO + SLOT, At::Ram(MORE_RAM.0), PAGES);
        let mut words = self.words(FROM, TO, PAGES);
        for _ in 0..20 {
            let to = TO + SLOT * self.random.u64(..2);
            words.extend(self.words(FROM, to, PAGES));
        }
        for _ in 0..5 {
            driver.queue(&mut lane.channel, &words);
        }
        driver.submit(&mut lane.channel, &words);
    }

    fn leave(&mut self, mut driver: Driver, mut lanes: Vec<Lane>, exit: Exit) {
        match exit {
            Exit::Orderly => self.go(driver, lanes),
            Exit::Dropped => {
                lanes.iter_mut().for_each(|lane| self.load(&mut driver, lane));
                let files = driver.guest.vanish();
                if self.random.bool() {
                    self.wait_gone();
                }
                self.remove();
                self.check_untouched(&files);
            }
            Exit::Unmapped => {
                lanes.iter_mut().for_each(|lane| self.load(&mut driver, lane));
                let file = driver.guest.unmap_ram(MORE_RAM.0).unwrap();
                fill_file(&file);
                for lane in &mut lanes {
                    // The channel's work either completes, or faults at its first write to withdrawn memory.
                    driver.submit(&mut lane.channel, &[]);
                    while !driver.is_done(&lane.channel)
                        && !driver.faults.iter().any(|it| it.instance == lane.channel.instance)
                    {
                        assert!(driver.guest.wait_msi());
                        driver.service();
                    }
                }
                assert!(is_filled(&file), "the card wrote to reclaimed RAM");
                driver.faults.clear();
                self.go(driver, lanes);
            }
            Exit::Removed => {
                let (place, url) = (self.crowd.place, self.url());
                thread::scope(|scope| {
                    scope.spawn(move || Client::new(place.path("admin.sock")).unwrap().delete(&url).unwrap());
                    while driver.guest.is_there() {
                        let lane = self.random.usize(..lanes.len());
                        self.copy(&mut driver, &mut lanes[lane]);
                    }
                });
                let files = driver.guest.vanish();
                self.check_untouched(&files);
            }
            Exit::Reset => {
                lanes.iter_mut().for_each(|lane| self.load(&mut driver, lane));
                driver.guest.reset();
                assert_eq!(self.show().channels_used, 0, "channels after a reset");
                driver.start_over();
                let mut lanes = vec![self.lane(&mut driver, 0)];
                self.copy(&mut driver, &mut lanes[0]);
                self.go(driver, lanes);
            }
        }
    }

    /// Unbinds the channels and disconnects. Then the VM is removed, sometimes after another client has connected.
    fn go(&mut self, mut driver: Driver, lanes: Vec<Lane>) {
        for lane in &lanes {
            driver.unbind(&lane.channel);
        }
        driver.submit_runlist();
        driver.guest.leave();
        self.wait_gone();
        if self.random.u64(..3) == 0 {
            let mut driver = self.born();
            let mut lane = self.lane(&mut driver, 1);
            self.copy(&mut driver, &mut lane);
            drop(driver);
        }
        self.remove();
    }

    /// Waits until the daemon has detected the client's disconnection and freed the client's resources.
    fn wait_gone(&self) {
        let last = RefCell::new(None);
        let tell = || format!("the client's resources to be freed: {:#?}", last.take());
        until_told(tell, || {
            let vm = self.show();
            let is_empty = vm.channels_used == 0 && vm.counters["address_spaces"] == 0;
            let is_back = vm.state == api::VmState::Waiting && is_empty;
            last.replace(Some(vm));
            is_back.then_some(())
        });
    }

    fn remove(&self) {
        self.admin.delete(&self.url()).unwrap();
    }

    /// Checks that the card no longer writes to the RAM of a removed VM.
    fn check_untouched(&self, files: &[OwnedFd]) {
        files.iter().for_each(fill_file);
        // This request takes long enough for the card's outstanding work to complete.
        let _: api::Card = self.admin.get("/v1/cards/card0").unwrap();
        assert!(files.iter().all(is_filled), "the card wrote to the RAM of a removed VM");
    }
}

fn fill_file(file: &OwnedFd) {
    assert_eq!(rustix::io::pwrite(file, &vec![0xee; MIB as usize], 0), Ok(MIB as usize));
}

fn is_filled(file: &OwnedFd) -> bool {
    let mut found = vec![0; MIB as usize];
    read_file(file, 0, &mut found);
    found.iter().all(|byte| *byte == 0xee)
}

fn fill(driver: &Driver, at: At, pages: u64, seed: u32) {
    match at {
        At::Vram(at) => (0..pages).for_each(|page| driver.guest.vram_write(at + page * PAGE, &pattern(seed, page))),
        At::Ram(gpa) => driver.fill_ram(gpa, pages, seed),
    }
}

fn holds(driver: &Driver, at: At, pages: u64, seed: u32) -> bool {
    match at {
        At::Vram(at) => driver.vram_holds(at, pages, seed),
        At::Ram(gpa) => driver.ram_holds(gpa, pages, seed),
    }
}
