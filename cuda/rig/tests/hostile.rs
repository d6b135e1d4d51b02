//! Hostile programs next to an honest neighbour, under the real owner on the fake driver: real processes.

mod support;

#[path = "hostile/accounts.rs"]
mod accounts;
#[path = "hostile/bounds.rs"]
mod bounds;
#[path = "hostile/cards.rs"]
mod cards;
#[path = "hostile/process.rs"]
mod process;
#[path = "hostile/turns.rs"]
mod turns;

use std::time::Duration;

use support::hostile::{Manner, Neighbour, Raw, Through, account, accounts, assert_kept};
use support::{Rig, owner};

#[test]
fn a_neighbour_that_nobody_attacks_keeps_what_it_has() {
    let rig = Rig::new(256);
    let mut serving = owner(&rig, 64, &["--quanta", "off"]);
    let mut neighbour = Neighbour::start(&rig, "b", &[]);
    let mut raw = Raw::start(&rig, None);
    let (link, answer) = raw.hello("a", Through::Itself, Some(Manner::honest()));
    assert!(matches!(answer, Some(cuda_protocol::FromOwner::Welcome(_))), "{answer:?}");
    assert_eq!(raw.allocate(link, 1, 3).len(), 3);
    let view = accounts(&mut serving);
    assert_eq!(account(&view, 0, "chunks_on_card"), 3, "{view}");
    let control = neighbour.during(Duration::from_millis(500));
    let same = neighbour.during(Duration::from_millis(500));
    assert!(control.kernels > 0 && control.card_us > 0, "{control:?}");
    // Nothing is between them but the host's noise.
    if same.card_us >= control.card_us {
        assert_kept(&control, &same);
    } else {
        assert_kept(&same, &control);
    }
    neighbour.end();
    drop(raw);
    support::describe(serving);
}
