//! Tests records of accesses to guest memory.

use super::{A, B, CARD_MIB, MIB, driver};
use card_manager::Counted;
use rig::driver::{At, CE0, ce_copy, object};
use rig::{Rig, sharing};
use simgpu::Config;
use vram::TenantId;

/// Guest VRAM chunks, one for each buffer, which is the first page of its chunk.
const CHUNKS: [u64; 3] = [4, 5, 6];
const CHUNK: u64 = 2 * MIB;

#[test]
fn accesses_are_counted_per_chunk_while_recorded() {
    for (profile, counted) in [(true, Counted::Bursts), (false, Counted::Submissions)] {
        let config = Config { vram_mib: CARD_MIB, profile, ..Config::default() };
        let rig = Rig::made(&config, &sharing(), |card| card);
        let mut driver = driver(&rig, 0);
        let mut channel = driver.channel(1);
        let places = [A, B, B + 0x10_0000];
        for (va, chunk) in places.into_iter().zip(CHUNKS) {
            driver.map(channel.space, va, At::Vram(chunk * CHUNK), 1);
        }
        driver.flush();
        let mut copy = |driver: &mut rig::driver::Driver, to: u64| {
            driver.submit(&mut channel, &[object(CE0), ce_copy(A, to, 1)].concat());
            driver.wait(&channel);
        };
        // Accesses before the start of the record are not counted.
        (0..5).for_each(|_| copy(&mut driver, places[2]));
        assert!(rig.host.lock().start_accesses(TenantId(0)));
        assert!(!rig.host.lock().start_accesses(TenantId(0)), "a record is already in progress");
        assert!(!rig.host.lock().start_accesses(TenantId(7)), "the VM does not exist");
        (0..3).for_each(|_| copy(&mut driver, places[1]));
        copy(&mut driver, places[2]);
        let record = rig.host.lock().end_accesses(TenantId(0)).unwrap();
        assert_eq!(record.counted, counted);
        let [from, often, once] = CHUNKS.map(|chunk| record.counts[chunk as usize]);
        assert!(from > often && often > once && once > 0, "{record:?}");
        assert_eq!(record.counts.len() as u64, super::VM_MIB * MIB / CHUNK);
        assert_eq!(rig.host.lock().end_accesses(TenantId(0)), None, "the record has ended");
        // The record ends when its VM is removed.
        assert!(rig.host.lock().start_accesses(TenantId(0)));
        driver.guest.remove().unwrap();
        assert_eq!(rig.host.lock().end_accesses(TenantId(0)), None);
    }
}
