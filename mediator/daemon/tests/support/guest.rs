//! A guest without a VMM, with work in flight on a daemon's VM.

use rig::driver::{CE0, Channel, Driver, M2MF, PAGE, ce_copy, m2mf_copy, object};
use rig::{Machine, RemoteGuest};

use super::Place;

/// Bytes per MiB.
pub const MIB: u64 = 1 << 20;
/// VRAM size of each VM, in MiB.
pub const VM_MIB: u64 = 32;
/// Virtual address of the source buffer.
const FROM: u64 = 0x100_0000;
const TO: u64 = 0x200_0000;
/// Size of a copy in flight, in pages.
const PAGES: u64 = 64;

/// Guest with a channel and buffers.
pub struct Guest {
    pub driver: Driver<RemoteGuest>,
    channel: Channel,
    begun: Vec<(u64, u32)>,
    seed: u32,
}

impl Guest {
    pub fn new(place: &Place, vm: &str) -> Self {
        let mut guest = RemoteGuest::connect(&place.path(&format!("{vm}.sock")), VM_MIB * MIB).unwrap();
        assert!(guest.map_ram(0, MIB, true));
        let mut driver = Driver::new(guest);
        let channel = driver.channel(1);
        Self { driver, channel, begun: Vec::new(), seed: 0 }
    }

    /// Starts copies without waiting for them.
    pub fn begin(&mut self) {
        let Self { driver, channel, begun, seed } = self;
        for by in 0..3 {
            *seed += 1;
            let (from, to) = (FROM + by * PAGES * PAGE, TO + by * PAGES * PAGE);
            driver.buffer(channel, from, PAGES, *seed);
            begun.push((driver.buffer(channel, to, PAGES, 7), *seed));
            let copy = match by % 2 {
                0 => [object(M2MF), m2mf_copy(from, to, (PAGES * PAGE) as u32)].concat(),
                _ => [object(CE0), ce_copy(from, to, PAGES as u32)].concat(),
            };
            driver.submit(channel, &copy);
        }
    }

    /// Waits for all started copies, and checks that they are correct and caused no faults.
    pub fn check(&mut self) {
        let Self { driver, channel, begun, .. } = self;
        driver.wait(channel);
        for (place, seed) in begun.drain(..) {
            assert!(driver.vram_holds(place, PAGES, seed), "copy {seed}");
        }
        assert!(driver.faults.is_empty(), "{:?}", driver.faults);
        // Reuse the channel's memory.
        driver.unbind(channel);
        driver.rewind();
        *channel = driver.channel(1);
    }

    /// Checks that the device responds after a reset, restarts its driver, and verifies copies.
    pub fn begin_anew(&mut self) {
        let Self { driver, channel, begun, .. } = self;
        begun.clear();
        // PMC_BOOT_0 shows that the device responds.
        assert_eq!(driver.guest.rd(0) >> 20, 0x0c0);
        driver.start_over();
        *channel = driver.channel(1);
        self.begin();
        self.check();
    }
}
