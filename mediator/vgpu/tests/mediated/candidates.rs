//! Tests guests that load firmware into the falcons of their vGPUs.

use super::{driver, rig};
use firmware::{Inbox, Store};
use nvspec::falcon::{CODE_PAGE_WORDS, Falcon};
use nvspec::regs::fecs;
use std::time::{Duration, Instant};

#[test]
fn firmware_started_by_guest_becomes_candidate() {
    let folder = tempfile::tempdir().expect("a temporary folder can be created");
    let (rig, store) = (rig(), Store::within(folder.path()));
    rig.host.collect_firmware(Inbox::for_store(store.clone()).expect("a thread can be started"));
    let mut driver = driver(&rig, 0);
    for falcon in [Falcon::Fecs, Falcon::Gpccs] {
        let at = |register: u32| falcon.base() + (register - fecs::BASE);
        driver.guest.wr(at(fecs::IMEM_CONTROL::OFFSET), fecs::IMEM_CONTROL::WRITE_INCREMENT.mask());
        (1..=CODE_PAGE_WORDS as u32).for_each(|word| driver.guest.wr(at(fecs::IMEM_DATA::OFFSET), word));
    }
    driver.guest.wr(fecs::CPU_CONTROL::OFFSET, fecs::CPU_CONTROL::START.mask());
    let began = Instant::now();
    let listed = loop {
        let listed = store.list().expect("the folder can be listed");
        if listed.len() == 2 {
            break listed;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{listed:?}");
        std::thread::sleep(Duration::from_millis(1));
    };
    assert!(listed.iter().all(|entry| entry.code_words == CODE_PAGE_WORDS && !entry.approved));
    assert_eq!(listed.iter().map(|entry| entry.falcon).collect::<Vec<_>>(), [Falcon::Fecs, Falcon::Gpccs]);
}
