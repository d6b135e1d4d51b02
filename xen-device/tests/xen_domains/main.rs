//! Tests domains of a fake hypervisor: arbitrary requests in any order and of any size, and domains that start and end.

mod bar_backing;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use vmm_glue::{IrqCounts, Link, RegionIndex, StopHandle};
use xen_device::fake::{FakeDomain, FakeSpec, FakeXen};
use xen_device::hypervisor::Range;
use xen_device::model::{AREA, BAR0, BAR1, MSI, Model, Seen, register};
use xen_device::requests::{Request, kind};
use xen_device::{XenOptions, XenServer, fuzz};

/// Address of BAR0 in the tests.
const PLACE0: u64 = 0xf100_2000;
/// Address of BAR1 in the tests, directly after BAR0.
const PLACE1: u64 = PLACE0 + BAR0;
const PAGE: u64 = 4096;
/// TIMEOUT: far longer than any test.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

struct Rig {
    xen: FakeXen,
    link: Link,
    seen: Arc<Mutex<Seen>>,
    stop: StopHandle,
    thread: Option<std::thread::JoinHandle<Result<(), String>>>,
}

impl Rig {
    fn new() -> Self {
        let xen = FakeXen::default();
        let link = Link::new(IrqCounts { intx: 1, msi: 1, ..IrqCounts::default() }).unwrap();
        let stop = StopHandle::new().unwrap();
        let (mut device, seen) = Model::new(&link);
        let mut server = XenServer::with(XenOptions::new("guest".parse().unwrap()), xen.hypervisor(), xen.store());
        let (served, stopped) = (link.clone(), stop.clone());
        let thread =
            std::thread::spawn(move || server.run(&served, &mut device, &stopped).map_err(|error| error.to_string()));
        Self { xen, link, seen, stop, thread: Some(thread) }
    }

    /// Creates a domain, waits until it is served, and sets the addresses of its BARs.
    fn domain(&self, spec: FakeSpec) -> FakeDomain {
        let domain = self.xen.create(spec);
        domain.wait_served();
        place(&domain);
        domain
    }

    fn guest(&self) -> FakeDomain {
        self.domain(FakeSpec::new(1, "guest"))
    }

    fn take_accesses(&self) -> Vec<(RegionIndex, u64, usize, bool)> {
        std::mem::take(&mut self.seen.lock().accesses)
    }

    fn counter(&self, name: &str) -> u64 {
        serde_json::to_value(self.link.counters().snapshot()).unwrap()[name].as_u64().unwrap()
    }

    fn end(mut self) {
        self.finish();
        assert_eq!(self.xen.breaches(), [""; 0]);
        let seen = self.seen.lock();
        assert!(seen.mapped.is_empty() && seen.came == seen.went, "{seen:?}");
    }

    fn finish(&mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            assert_eq!(thread.join().expect("no panic"), Ok(()));
        }
    }
}

fn place(domain: &FakeDomain) {
    domain.config_write(0x10, PLACE0 as u32);
    domain.config_write(0x14, PLACE1 as u32);
    domain.config_write(0x04, 6);
}

fn until(what: &str, mut look: impl FnMut() -> bool) {
    let end = Instant::now() + WAIT_TIMEOUT;
    while !look() {
        assert!(Instant::now() < end, "waited for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn write_memory(domain: &FakeDomain, at: u64, data: &[u8]) {
    rustix::io::pwrite(domain.file(), data, at).unwrap();
}

fn read_memory(domain: &FakeDomain, at: u64, len: usize) -> Vec<u8> {
    let mut data = vec![0; len];
    rustix::io::pread(domain.file(), &mut data, at).unwrap();
    data
}

#[test]
fn bars_answer_where_the_guest_puts_them() {
    let rig = Rig::new();
    let domain = rig.guest();
    assert_eq!(domain.config_read(0), 0x06d8_10de);
    let range = |first, size| Range { first, last: first + size - 1 };
    assert_eq!(domain.ranges(), [range(PLACE0, BAR0), range(PLACE1, BAR1)]);
    domain.write(0, PLACE1 + 8, 4, 0x1234_5678);
    assert_eq!(domain.read(0, PLACE1 + 8, 4), 0x1234_5678);
    // Move one BAR above 4 GiB, as firmware does with BARs that do not fit below.
    domain.config_write(0x18, 0x10);
    assert_eq!(domain.ranges(), [range(PLACE0, BAR0), range(0x10_0000_0000 + PLACE1, BAR1)]);
    assert_eq!(domain.read(0, 0x10_0000_0000 + PLACE1 + 8, 4), 0x1234_5678, "the contents move with it");
    assert_eq!(domain.read(0, PLACE1 + 8, 4), u64::MAX);
    // While a guest probes sizes, decoding is off.
    domain.config_write(0x04, 0);
    assert!(domain.ranges().is_empty());
    domain.config_write(0x10, u32::MAX);
    assert_eq!(domain.config_read(0x10), 0xffff_e000);
    rig.end();
}

#[test]
fn bars_that_lie_on_each_other_are_claimed_once() {
    let rig = Rig::new();
    let domain = rig.guest();
    domain.config_write(0x14, PLACE0 as u32);
    assert_eq!(domain.ranges().len(), 1);
    domain.config_write(0x14, PLACE1 as u32);
    assert_eq!(domain.ranges().len(), 2);
    // The addresses of a BAR at the end of the address space must not wrap around.
    domain.config_write(0x14, 0xffff_f000);
    domain.config_write(0x18, u32::MAX);
    assert!(domain.ranges().len() <= 2);
    rig.end();
}

#[test]
fn accesses_of_any_size_are_cut_as_devices_take_them() {
    let rig = Rig::new();
    let domain = rig.guest();
    rig.take_accesses();
    domain.write(0, PLACE1 + 3, 4, 0x4433_2211);
    let pieces = [(3, 1), (4, 2), (6, 1)].map(|(offset, len)| (RegionIndex::Bar1, offset, len, true));
    assert_eq!(rig.take_accesses(), pieces);
    assert_eq!(domain.read(0, PLACE1, 8), 0x0044_3322_1100_0000);
    assert_eq!(domain.read(0, PLACE1 + 5, 1), 0x33);
    rig.end();
}

#[test]
fn repeated_accesses_go_both_ways_and_through_memory() {
    let rig = Rig::new();
    let domain = rig.guest();
    let from = 0x2000;
    let data: Vec<u8> = (0..64).collect();
    write_memory(&domain, from, &data);
    let base = Request { count: 16, size: 4, data_is_address: true, ..Request::default() };
    domain.memory(0, Request { address: PLACE1, data: from, ..base });
    let read = Request { address: PLACE1, data: 0x3000, read: true, ..base };
    domain.memory(0, read);
    assert_eq!(read_memory(&domain, 0x3000, 64), data);
    // With the direction flag set, the first item is the last one in memory.
    domain.memory(0, Request { address: PLACE1 + 60, data: 0x4000 + 60, backwards: true, ..read });
    assert_eq!(read_memory(&domain, 0x4000, 64), data);
    domain.memory(0, Request { address: PLACE1 + 0x1060, data: from + 60, backwards: true, read: false, ..read });
    assert_eq!(domain.read(0, PLACE1 + 0x1060 - 60, 4), 0x0302_0100);
    // Without a data address, every item stores the same value.
    domain.memory(0, Request { address: PLACE1 + 0x100, data: 0x55, count: 3, size: 1, ..Request::default() });
    assert_eq!(domain.read(0, PLACE1 + 0x100, 4), 0x0055_5555);
    // Missing memory reads as all ones, and ignores writes.
    domain.memory(0, Request { address: PLACE1, data: 1 << 40, count: 1, ..base });
    assert_eq!(domain.read(0, PLACE1, 4), 0xffff_ffff);
    domain.memory(0, Request { address: PLACE1, data: 1 << 40, count: 1, read: true, ..base });
    rig.end();
}

#[test]
fn access_that_straddles_bars_reaches_both() {
    let rig = Rig::new();
    let domain = rig.guest();
    rig.take_accesses();
    domain.write(0, PLACE1 - 4, 8, 0x8877_6655_4433_2211);
    let expected = [(RegionIndex::Bar0, BAR0 - 4, 4, true), (RegionIndex::Bar1, 0, 4, true)];
    assert_eq!(rig.take_accesses(), expected);
    assert_eq!(domain.read(0, PLACE1 - 2, 4), 0x6655_4433);
    // Xen forwards accesses that span adjacent ranges, but a server must not rely on this.
    let beyond = Request { address: PLACE1 + BAR1 - 2, size: 8, count: 1, kind: kind::MEMORY, ..Request::default() };
    let read = Request { read: true, ..beyond };
    domain.request(0, &Request { data: 0x2211, ..beyond }).unwrap();
    assert_eq!(domain.request(0, &read), Some(0xffff_ffff_ffff_2211), "bytes without a target read as ones");
    rig.end();
}

#[test]
fn malformed_requests_are_answered_and_go_nowhere() {
    let rig = Rig::new();
    let domain = rig.guest();
    rig.take_accesses();
    let good = Request { address: PLACE1, size: 4, count: 1, read: true, kind: kind::MEMORY, ..Request::default() };
    let bad = [
        Request { size: 0, ..good },
        Request { size: 3, ..good },
        Request { size: 16, ..good },
        Request { size: u32::MAX, ..good },
        Request { count: 0, ..good },
        Request { count: 4097, ..good },
        Request { count: u32::MAX, ..good },
        Request { address: u64::MAX, ..good },
        Request { address: 0, count: 2, backwards: true, ..good },
        Request { data: u64::MAX, data_is_address: true, ..good },
    ];
    for request in bad {
        assert_eq!(domain.request(0, &request), Some(u64::MAX), "{request:?}");
    }
    assert_eq!(rig.counter("errors"), bad.len() as u64);
    // Make requests for other devices: ports, another function, kinds that no version of Xen sends, and configuration
    // space beyond this device's space.
    let slot = u64::from(XenOptions::SLOT) << 35;
    for (kind, address) in [
        (kind::PORT, 0xcfc),
        (kind::PCI_CONFIG, slot + (1 << 32)),
        (kind::PCI_CONFIG, slot | 1 << 40),
        (kind::PCI_CONFIG, slot | 0xff),
        (kind::PCI_CONFIG, slot | 0x100),
        (3, PLACE1),
        (255, PLACE1),
    ] {
        let answer = domain.request(0, &Request { kind, address, ..good }).unwrap();
        assert_eq!(answer & 0xffff_ffff, 0xffff_ffff, "kind {kind} at {address:#x}");
    }
    domain.request(0, &Request { kind: kind::TIME_OFFSET, ..good }).unwrap();
    assert!(rig.take_accesses().is_empty());
    assert_eq!(domain.read(0, PLACE1, 4), 0, "the server continues");
    rig.end();
}

#[test]
fn junk_in_shared_pages_is_harmless() {
    let rig = Rig::new();
    let domain = rig.guest();
    for state in 0..=255u8 {
        // Write each state to the slot of a virtual CPU that does not exist.
        domain.junk(false, 5 * 32 + 30, &[state, state]);
        // Set the slot of an existing virtual CPU to a state that is not a request.
        if state & 0xf != 1 {
            domain.junk(false, 30, &[state, 1]);
        }
        assert_eq!(rig.link.client().unwrap().domain, Some(1));
    }
    domain.junk(false, 30, &[0, 0]);
    // Write a ring that claims to contain more than its size, and then a ring with half of a long entry.
    domain.junk(true, 0, &[0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]);
    until("the ring to be dropped", || rig.counter("errors") == 1);
    domain.junk(true, 0, &[0; 8]);
    domain.junk(true, 8, &[1, 0b1100, 0, 0]);
    domain.junk(true, 0, &[0, 0, 0, 0, 1, 0, 0, 0]);
    until("half an entry to be dropped", || rig.counter("errors") == 2);
    assert_eq!(domain.read(0, PLACE1, 4), 0);
    rig.end();
}

#[test]
fn buffered_writes_come_before_the_access_that_follows() {
    let rig = Rig::new();
    let domain = rig.guest();
    // Xen buffers only writes below 1 MiB, where a guest can place a BAR.
    domain.config_write(0x14, 0x8_0000);
    for number in 0..1500u64 {
        let request = Request { address: 0x8_0000, size: 8, count: 1, data: number << 32 | 7, ..Request::default() };
        let request = Request { kind: kind::MEMORY, ..request };
        until("space in the ring", || domain.buffer(&request));
        assert_eq!(domain.read(0, 0x8_0000, 8), number << 32 | 7);
    }
    assert_eq!(rig.counter("posted"), 1500);
    rig.end();
}

#[test]
fn several_processors_at_once_are_each_answered() {
    let rig = Rig::new();
    let domain = rig.domain(FakeSpec { cpus: 8, ..FakeSpec::new(1, "guest") });
    let before: Vec<u64> = (0..8).map(|cpu| domain.notified(cpu)).collect();
    std::thread::scope(|scope| {
        for cpu in 0..8 {
            let domain = &domain;
            scope.spawn(move || {
                let at = PLACE1 + 0x100 * cpu as u64;
                for value in 0..200 {
                    domain.write(cpu, at, 8, value);
                    assert_eq!(domain.read(cpu, at, 8), value);
                }
            });
        }
    });
    for (cpu, before) in (0..8).zip(before) {
        assert_eq!(domain.notified(cpu) - before, 400, "one reply per access by virtual CPU {cpu}");
    }
    rig.end();
}

#[test]
fn interrupts_are_the_message_or_the_pin() {
    let rig = Rig::new();
    let domain = rig.guest();
    let (message, pin) = (PLACE0 + register::MESSAGE, PLACE0 + register::PIN);
    domain.write(0, pin, 8, 1);
    assert_eq!(domain.pin(), (true, 1));
    // The guest's next access may have removed the interrupt's cause, but here the cause remains.
    assert_eq!(domain.read(0, PLACE1, 4), 0);
    assert_eq!(domain.pin(), (true, 2));
    domain.write(0, pin, 8, 0);
    assert!(!domain.pin().0);
    domain.write(0, pin, 8, 1);
    // Disable the pin through the command register.
    domain.config_write(0x04, 0x406);
    assert!(!domain.pin().0);
    domain.config_write(0x04, 6);
    assert!(domain.pin().0, "the level is still asserted");
    domain.write(0, pin, 8, 0);

    domain.write(0, message, 8, 1);
    assert!(domain.messages().is_empty(), "messages are disabled");
    domain.config_write(MSI + 4, 0xfee0_1000);
    domain.config_write(MSI + 8, 1);
    domain.config_write(MSI + 12, 0x4041);
    domain.config_write(MSI, 1 << 16);
    assert_eq!(domain.messages(), [(0x1_fee0_1000, 0x4041)], "pending messages are delivered once enabled");
    domain.write(0, pin, 8, 1);
    assert!(!domain.pin().0, "with messages enabled, the pin is deasserted");
    domain.write(0, pin, 8, 0);
    // Change the message address.
    domain.config_write(MSI + 4, 0xfee0_2000);
    domain.write(0, message, 8, 1);
    assert_eq!(domain.messages().last(), Some(&(0x1_fee0_2000, 0x4041)));
    domain.config_write(MSI, 0);
    domain.write(0, message, 8, 1);
    assert_eq!(domain.messages().len(), 2);
    rig.end();
}

/// Size in bytes of the VGA memory below 1 MiB, where a domain has no RAM.
const VGA: u64 = 0x20 * PAGE;

/// Makes the device read 8 bytes of guest memory.
fn fetch(domain: &FakeDomain, cpu: usize, at: u64) -> u64 {
    domain.write(cpu, PLACE0 + register::FETCH, 8, at);
    domain.read(cpu, PLACE0 + register::DATA, 8)
}

/// Stops a load on drop.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn device_releases_memory_before_give_back_even_under_load() {
    let rig = Rig::new();
    let domain = rig.domain(FakeSpec { cpus: 2, ..FakeSpec::new(1, "guest") });
    let frames = (16 << 20) / PAGE;
    let asked = domain.asked();
    // The server queries the BARs' addresses only to check that the domain has no memory there.
    let bars = [PLACE0, PLACE1].map(|place| (place + AREA.offset) / PAGE);
    assert!(
        asked.iter().all(|first| *first >= (4 << 30) / PAGE || bars.contains(first)),
        "memory without holes is rechecked: {asked:x?}"
    );
    (0..frames).for_each(|frame| write_memory(&domain, frame * PAGE, &(frame + 1).to_le_bytes()));
    let whole = (16 << 20) - VGA;
    assert_eq!(rig.counter("dma_bytes"), whole);
    assert_eq!(fetch(&domain, 0, 0xa0 * PAGE), u64::MAX, "a PC has its VGA memory there");
    assert_eq!(fetch(&domain, 0, 700 * PAGE), 701);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut frame = 0;
            while !done.load(Ordering::Relaxed) {
                frame = (frame + 37) % frames;
                let fetched = fetch(&domain, 0, frame * PAGE);
                assert!(fetched == frame + 1 || fetched == u64::MAX, "{fetched:#x} at frame {frame}");
            }
        });
        // Stop the load even after a failure, so that it does not outlive the test.
        let _ended = Ends(&done);
        for first in [0, 600, 511, 1024, 3000, 4090] {
            let gone = first..first + 5;
            domain.give_back(gone.clone());
            let table = rig.link.memory().snapshot();
            for frame in gone {
                assert!(table.find(frame * PAGE).is_none(), "frame {frame} is still mapped");
            }
        }
    });
    assert_eq!(fetch(&domain, 0, 602 * PAGE), u64::MAX);
    assert_eq!(fetch(&domain, 0, 605 * PAGE), 606, "adjacent frames stay");
    let left = rig.counter("dma_bytes");
    assert_eq!(left, whole - 30 * PAGE);
    // The guest takes back part of the hole without a notification.
    domain.populate(600..605);
    until("the memory to return", || rig.counter("dma_bytes") == left + 5 * PAGE);
    assert_eq!(fetch(&domain, 0, 602 * PAGE), 603);
    rig.end();
}

#[test]
fn memory_full_of_holes_is_lent_up_to_region_limit() {
    let rig = Rig::new();
    let domain = rig.guest();
    for frame in (0..4096).step_by(2) {
        domain.take(frame..frame + 1);
    }
    domain.give_back(0..1);
    assert_eq!(rig.counter("dma_bytes"), (8 << 20) - VGA / 2, "every second page is present");
    assert_eq!(domain.read(0, PLACE1, 4), 0);
    rig.end();
}

#[test]
fn processor_that_dies_in_flight_leaves_a_clean_device() {
    let rig = Rig::new();
    let domain = rig.guest();
    domain.write(0, PLACE1, 4, 7);
    // Destroy the domain while a request is in flight. The request may or may not be answered.
    domain.put(0, &Request { address: PLACE1, size: 4, count: 1, kind: kind::MEMORY, ..Request::default() }).unwrap();
    domain.destroy();
    domain.wait_left();
    // Reboot the domain, with another ID and the same name.
    let domain = rig.domain(FakeSpec::new(2, "guest"));
    assert_eq!(domain.read(0, PLACE1, 4), 0, "no data from the previous domain");
    assert_eq!(rig.link.client().unwrap().domain, Some(2));
    rig.end();
}

#[test]
fn old_domain_that_lingers_while_the_new_one_is_there_is_left() {
    let rig = Rig::new();
    let old = rig.guest();
    // Both domains exist briefly, as when a toolstack reboots a domain.
    let new = rig.xen.create(FakeSpec::new(9, "guest"));
    assert_eq!(old.read(0, PLACE1, 4), 0);
    old.destroy();
    new.wait_served();
    assert_eq!(rig.link.client().unwrap().domain, Some(9));
    rig.end();
}

#[test]
fn domains_that_cannot_be_served_are_left_alone() {
    let rig = Rig::new();
    let other = rig.xen.create(FakeSpec::new(1, "other"));
    let pv = rig.xen.create(FakeSpec { hvm: false, ..FakeSpec::new(2, "guest") });
    pv.wait_seen();
    pv.destroy();
    // Mapping never-used pages would count against the domain's page limit.
    let sparse = rig.xen.create(FakeSpec { target_kib: Some(8 << 10), ..FakeSpec::new(3, "guest") });
    sparse.wait_seen();
    sparse.destroy();
    let good = rig.domain(FakeSpec::new(4, "guest"));
    assert_eq!(good.read(0, PLACE1, 4), 0);
    assert_eq!(rig.seen.lock().came, 1);
    other.destroy();
    rig.end();
}

#[test]
fn operator_disconnects_a_domain_for_good() {
    let rig = Rig::new();
    let domain = rig.guest();
    rig.link.disconnect();
    domain.wait_left();
    assert_eq!(rig.link.client(), None);
    // Creating other domains must not cause the domain to be served again.
    rig.xen.create(FakeSpec::new(5, "other")).destroy();
    domain.destroy();
    let again = rig.domain(FakeSpec::new(6, "guest"));
    assert_eq!(again.read(0, PLACE1, 4), 0);
    assert_eq!(rig.seen.lock().came, 2);
    rig.end();
}

#[test]
fn domain_is_not_saved_while_it_is_served() {
    let rig = Rig::new();
    let domain = rig.guest();
    until("saves to be refused", || domain.saves_refused());
    rig.link.disconnect();
    until("saves to be permitted", || !domain.saves_refused());
    rig.end();
}

#[test]
fn host_that_fails_ends_the_server_and_leaves_nothing() {
    let mut rig = Rig::new();
    let domain = rig.guest();
    domain.break_events();
    let error = rig.thread.take().unwrap().join().expect("no panic").unwrap_err();
    assert!(!error.is_empty());
    domain.wait_left();
    rig.end();
}

#[test]
fn any_bytes_are_survived() {
    use proptest::prelude::*;
    let config = ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |(bytes in proptest::collection::vec(any::<u8>(), 0..600))| fuzz::run(&bytes));
}

#[test]
fn seeds_of_the_fuzz_target_run() {
    let folder = std::path::PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fuzz/corpus/xen_requests");
    let seeds: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(seeds.len() >= 10, "{seeds:?}");
    for seed in seeds {
        println!("{}", seed.display());
        fuzz::run(&std::fs::read(seed).unwrap());
    }
}
