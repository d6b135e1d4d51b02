//! Tests posted writes to host memory that are in flight.

use super::driver::{At, CE0, Channel, Driver, PAGE, ce_copy, methods, object, pattern, release, small, words};
use nvspec::regs::{pfb, pflush};
use std::sync::Arc;
use vm_memory::{Bytes, MmapRegion, VolatileMemory};

const A: u64 = 0x100_0000;
const B: u64 = 0x200_0000;
const SEM: u64 = 0x300_0000;
const HOST: u64 = 0x8000_0000;
/// I/O virtual address of the flush page.
const FLUSH_PAGE: u64 = 0x9000_0000;

struct Scene {
    driver: Driver,
    channel: Channel,
    region: Arc<MmapRegion>,
    _page: Arc<MmapRegion>,
}

impl Scene {
    /// Creates a card that holds back posted writes, and the buffers for [`Self::copy`], which copies pattern 1 to host
    /// memory.
    fn new() -> Self {
        let mut driver = Driver::new(&small());
        let channel = driver.only_channel(1);
        let (region, page) = (driver.host(HOST, 1), driver.host(FLUSH_PAGE, 1));
        driver.buffer(&channel, A, 1, 1);
        driver.buffer(&channel, SEM, 1, 0);
        driver.map(channel.space, B, At::Host(HOST), 1);
        driver.card.hold_posted_writes(true);
        Self { driver, channel, region, _page: page }
    }

    fn copy(&mut self, more: &[Vec<u32>]) {
        let all = [vec![object(CE0), ce_copy(A, B, 1)], more.to_vec()].concat();
        self.driver.push(&mut self.channel, &words(&all));
        self.driver.run_until_idle();
    }

    fn barrier(&self) {
        self.driver.wr(pflush::BAR_FLUSH::OFFSET, 1);
    }

    fn arrived(&self) -> bool {
        first_word(&self.region) == pattern(1, 0)
    }
}

fn first_word(region: &MmapRegion) -> u32 {
    let mut word = [0; 4];
    region.as_volatile_slice().read_slice(&mut word, 0).expect("within");
    u32::from_le_bytes(word)
}

#[test]
fn barrier_has_writes_arrive_if_it_has_a_page() {
    let mut scene = Scene::new();
    scene.copy(&[]);
    scene.barrier();
    assert!(!scene.arrived(), "no flush page was set");
    scene.driver.wr(pfb::NISO_ADDRESS::OFFSET, (FLUSH_PAGE >> 8) as u32);
    assert!(!scene.arrived());
    scene.barrier();
    assert!(scene.arrived());
}

#[test]
fn semaphore_with_wait_for_idle_follows_engine_writes() {
    let mut scene = Scene::new();
    scene.copy(&[methods(0, 0x10, &[0, SEM as u32, 7, 2 | 1 << 20])]);
    assert!(!scene.arrived(), "a release that does not wait does not complete the writes");
    scene.copy(&[release(SEM, 8)]);
    assert!(scene.arrived());
}

#[test]
fn host_memory_read_completes_after_posted_writes() {
    let mut scene = Scene::new();
    let back = scene.driver.buffer(&scene.channel, 0x400_0000, 1, 9);
    scene.copy(&[ce_copy(B, 0x400_0000, 1)]);
    assert!(scene.arrived() && scene.driver.holds(back, 1, 1));
}

#[test]
fn late_write_is_lost_or_reaches_new_owner_of_address() {
    use card::Card;
    let mut scene = Scene::new();
    scene.driver.wr(pfb::NISO_ADDRESS::OFFSET, (FLUSH_PAGE >> 8) as u32);
    scene.copy(&[]);
    scene.driver.card.unmap_dma(HOST, PAGE).expect("mapped");
    scene.barrier();
    assert_eq!((scene.arrived(), scene.driver.card.counters().lost), (false, 1));
    let other = scene.driver.host(HOST, 1);
    scene.copy(&[]);
    scene.driver.card.unmap_dma(HOST, PAGE).expect("mapped");
    let another = scene.driver.host(HOST, 1);
    scene.barrier();
    assert_eq!((first_word(&other), first_word(&another)), (0, pattern(1, 0)));
}
