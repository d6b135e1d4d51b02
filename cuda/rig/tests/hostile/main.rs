//! Tests hostile programs next to an honest neighbour, under the real owner on the fake driver. All are real processes.

#[path = "../support/mod.rs"]
mod support;

mod accounts;
mod bounds;
mod cards;
mod process;
mod turns;

use support::hostile::*;
use support::{Rig, owner};

#[test]
fn unattacked_neighbour_keeps_its_share() {
    let rig = Rig::new(256);
    let mut serving = owner(&rig, 64, &[&["--quanta", "off"], &NEVER_IDLE[..]].concat());
    let mut neighbour = Neighbour::start(&rig, "b", &[]);
    let mut raw = Raw::start(&rig, None);
    let (link, answer) = raw.hello("a", Through::Itself, Some(Manner::honest()));
    assert!(matches!(answer, Some(cuda_protocol::FromOwner::Welcome(_))), "{answer:?}");
    assert_eq!(raw.allocate(link, 1, 3).len(), 3);
    let view = accounts(&mut serving);
    assert_eq!(account(&view, 0, "chunks_on_card"), 3, "{view}");
    assert_keeps(&mut serving, &mut neighbour, || {}, || {});
    assert_has_share(&mut serving, &mut neighbour, 1000);
    neighbour.end();
    drop(raw);
    support::describe(serving);
}
