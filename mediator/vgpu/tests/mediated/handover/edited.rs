//! Tests files of saved cards with modified sections and correct checksums. Each file must be rejected, or be opened
//! without any effect on the VMs.

use super::super::oversubscribe::eventually;
use super::super::relocate::{free_settings, move_all, work};
use super::super::{A, B};
use super::{PAGES, copy, driver, guests, handover};
use fastrand::Rng;
use rig::driver::Driver;
use sha2::{Digest, Sha256};
use std::ops::Range;
use vram::To;

/// Number of files per round.
const FILES: u64 = 60;
/// Number of rounds. The VMs work between rounds.
const ROUNDS: u64 = 4;
/// Size of a file's header in bytes: magic, format, identity, and count.
const HEAD: usize = 8 + 4 + 16 + 4;
/// Byte range of the identity in the header.
const IDENTITY: Range<usize> = 12..28;

/// A section of a file: its head (name and numbers), checksum, and contents.
struct Place {
    name: String,
    head: Range<usize>,
    sum: Range<usize>,
    contents: Range<usize>,
}

/// Returns the sections of a file in the `saved-state` format.
fn places(file: &[u8]) -> Vec<Place> {
    let mut places = Vec::new();
    let mut at = HEAD;
    while at < file.len() {
        let name = usize::from(file[at]);
        let head = at..at + 1 + name + 4 + 4 + 8;
        let length = u64::from_le_bytes(file[head.end - 8..head.end].try_into().expect("the slice has eight bytes"));
        let sum = head.end..head.end + 32;
        let contents = sum.end..sum.end + length as usize;
        at = contents.end;
        let name = String::from_utf8(file[head.start + 1..head.start + 1 + name].to_vec()).expect("the name is valid");
        places.push(Place { name, head, sum, contents });
    }
    places
}

/// Modifies a few bytes of a section, and updates its checksum. Returns the section's name.
fn edit(file: &mut [u8], dice: &mut Rng) -> String {
    edit_one(file, dice, |_| true)
}

/// Same as [`edit`], but only for sections for which `of` returns true.
pub(crate) fn edit_one(file: &mut [u8], dice: &mut Rng, of: impl Fn(&str) -> bool) -> String {
    let places: Vec<Place> = places(file).into_iter().filter(|place| of(&place.name)).collect();
    let place = &places[dice.usize(..places.len())];
    for _ in 0..=dice.u64(..3) {
        // Modify the start of a section more often, because counts are stored there.
        let near = if dice.bool() { place.contents.len() } else { place.contents.len().min(64) };
        let at = place.contents.start + dice.usize(..near.max(1));
        let byte = &mut file[at];
        *byte = match dice.u64(..4) {
            0 => *byte ^ 1 << dice.u64(..8),
            1 => byte.wrapping_add(1),
            2 => 0xff,
            _ => 0,
        };
    }
    seal(file, place);
    place.name.clone()
}

/// Updates the checksum of a modified section.
fn seal(file: &mut [u8], place: &Place) {
    let sum = Sha256::new()
        .chain_update(&file[IDENTITY])
        .chain_update(&file[place.head.clone()])
        .chain_update(&file[place.contents.clone()])
        .finalize();
    file[place.sum.clone()].copy_from_slice(&sum);
}

/// Returns the total size in bytes of the contents of all sections for which `of` returns true.
pub(crate) fn length(file: &[u8], of: impl Fn(&str) -> bool) -> usize {
    places(file).into_iter().filter(|place| of(&place.name)).map(|place| place.contents.len()).sum()
}

/// Zeroes the byte at index `at` of the concatenated sections that `of` accepts. Returns false if the byte is already
/// zero or does not exist.
pub(crate) fn zero_one(file: &mut [u8], of: impl Fn(&str) -> bool, mut at: usize) -> bool {
    for place in places(file).into_iter().filter(|place| of(&place.name)) {
        let len = place.contents.len();
        if at < len {
            let byte = &mut file[place.contents.start + at];
            let changes = *byte != 0;
            *byte = 0;
            seal(file, &place);
            return changes;
        }
        at -= len;
    }
    false
}

#[test]
fn edited_sections_are_refused_or_opened_and_change_nothing() {
    let handover = handover(64);
    let rig = handover.rig();
    let mut drivers: Vec<Driver> = (0..2).map(|vm| driver(&rig, vm, &free_settings(16))).collect();
    let mut dice = Rng::with_seed(18);
    let (mut refused, mut names) = (0, std::collections::BTreeMap::<String, u64>::new());
    for round in 0..ROUNDS {
        let mut channels = Vec::new();
        for (vm, driver) in (0..).zip(&mut drivers) {
            let mut channel = driver.channel(3);
            driver.buffer(&channel, A, PAGES, 50 + vm);
            let to = driver.buffer(&channel, B, PAGES, 7);
            if round % 2 == 0 {
                move_all(&rig, vm, To::Host);
            }
            copy(driver, &mut channel, vm);
            channels.push((channel, to));
        }
        for _ in 0..FILES {
            let mut name = String::new();
            let offered = handover.offer(&rig, &mut guests(&mut drivers), |file| name = edit(file, &mut dice));
            refused += u64::from(offered.is_err());
            *names.entry(name).or_default() += 1;
        }
        for (vm, (driver, (channel, to))) in (0..).zip(drivers.iter_mut().zip(&channels)) {
            driver.wait(channel);
            assert!(driver.vram_holds(*to, PAGES, 50 + vm), "VM {vm} in round {round}");
            assert_eq!((driver.faults.len(), driver.guest.counter("faults")), (0, 0));
            driver.unbind(channel);
            driver.submit_runlist();
            work(driver, 5, &mut Rng::with_seed(round));
        }
    }
    assert!(names.len() > 8 && refused > ROUNDS * FILES / 4, "{refused} rejected of {names:?}");
    eventually("all work has completed", || rig.host.lock().scheduler().in_flight() == 0);
}

#[test]
fn unedited_sections_have_the_sums_that_are_described() {
    let handover = handover(0);
    let rig = handover.rig();
    let mut drivers = vec![driver(&rig, 0, &free_settings(16))];
    let again = |file: &mut Vec<u8>| {
        for Place { head, sum, contents, .. } in places(file) {
            let made = Sha256::new()
                .chain_update(&file[IDENTITY])
                .chain_update(&file[head])
                .chain_update(&file[contents])
                .finalize();
            assert_eq!(file[sum], made[..]);
        }
    };
    handover.offer(&rig, &mut guests(&mut drivers), again).expect("the unchanged file is accepted");
}
