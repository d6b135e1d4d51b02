//! Tries the holes in the reference code of an earlier GPU mediator one by one, from inside a VM.
//!
//! `bar hole N` tries one hole, and `bar holes` tries all of them. Each prints `hole=N name=... outcome=denied
//! contained open ...`. Denied means that an attempt was visibly rejected (with a fault, or a read of all ones).
//! Contained means that it had no effect beyond the guest itself. Open means that it had such an effect. The program
//! then fails. Holes 1 to 19 are those of the reference code, in its order. Holes in its paravirtual interface are also
//! tried through registers and tables. Holes from 20 on use registers unknown to the reference code. Holes from 31 on
//! use the paravirtual interface, if the card has one.
//!
//! If `--share` is less than the VRAM that the card reports, the command must fail, because the rest is then treated as
//! another VM's VRAM. The attempts need exclusive access to the card, so no driver may be bound. Afterwards, a driver
//! must reinitialize the card.

mod channels;
mod lab;
mod paravirtual;
pub mod queue;
mod registers;
mod tables;
mod windows;

use anyhow::{Context, Result, bail, ensure};

use super::card::Card;
use super::layout::reg;
use crate::options::{Options, hex_bytes, number};
use crate::rig::Counts;
use crate::tests::Facts;
use lab::{Lab, Verdict};

/// A hole to try.
struct Hole {
    number: u32,
    name: &'static str,
    attempt: fn(&mut Lab<'_>, &mut Verdict) -> Result<()>,
}

macro_rules! holes {
    ($( $number:literal $name:literal $attempt:path; )*) => {
        &[$( Hole { number: $number, name: $name, attempt: $attempt } ),*]
    };
}

#[rustfmt::skip]
const HOLES: &[Hole] = holes! {
    1  "pramin-beyond-vram"      windows::pramin_beyond_vram;
    2  "pramin-target-bits"      windows::pramin_target_bits;
    3  "instance-rewritten"      channels::instance_rewritten;
    4  "unknown-instances"       channels::unknown_instances;
    5  "pointer-target-bits"     channels::pointer_target_bits;
    6  "unclaimed-registers"     registers::unclaimed;
    7  "peer-kind-tag"           tables::peer_kind_tag;
    8  "large-page-of-ram"       tables::large_page_of_ram;
    9  "stale-dma"               tables::stale_dma;
    10 "aperture-ram-entry"      windows::aperture_ram_entry;
    11 "entry-without-ram"       tables::entry_without_ram;
    12 "runlist-entries"         channels::runlist_entries;
    13 "channel-numbers"         channels::channel_numbers;
    14 "aperture-indexes"        windows::aperture_indexes;
    15 "table-confusion"         tables::confusion;
    16 "table-reused"            tables::reused;
    17 "residue"                 windows::residue;
    18 "overflow"                tables::overflow;
    19 "no-directory"            channels::no_directory;
    20 "foreign-flush"           registers::foreign_flush;
    21 "scheduler-masks"         registers::scheduler_masks;
    22 "graph-contexts"          registers::graph_contexts;
    23 "timer"                   registers::timer;
    24 "fuses"                   registers::fuses;
    25 "pmu"                     registers::pmu;
    26 "display"                 registers::display;
    27 "msi-rearm"               registers::msi_rearm;
    28 "crooked-accesses"        registers::crooked_accesses;
    29 "pci-configuration"       registers::pci_configuration;
    30 "context-images"          tables::context_images;
    31 "pv-channels"             paravirtual::channels;
    32 "pv-entries"              paravirtual::entries;
    33 "pv-types"                paravirtual::types;
    34 "pv-freed-in-use"         paravirtual::freed_in_use;
    35 "pv-malformed"            paravirtual::malformed;
    36 "pv-rings"                paravirtual::rings;
    37 "pv-raced"                paravirtual::raced;
    38 "pv-segments"             paravirtual::segments;
};

/// Runs `bar hole N` and `bar holes`.
pub fn run(card: &Card, options: &Options) -> Result<(Counts, Facts)> {
    let pattern = options.text("pattern").map(hex_bytes).transpose()?.unwrap_or_default();
    ensure!(pattern.is_empty() || pattern.len() >= 4, "--pattern must have 4 bytes or more");
    let chosen: Vec<&Hole> = match options.words() {
        [_, which] => {
            let number = number(which).context("the number of a hole")?;
            HOLES.iter().filter(|hole| u64::from(hole.number) == number).collect()
        }
        _ => HOLES.iter().collect(),
    };
    ensure!(!chosen.is_empty(), "no such hole, expected 1 to {}", HOLES.len());
    let boot0 = card.read(reg::BOOT0);
    ensure!(boot0 != u32::MAX && boot0 != 0, "the card does not respond: BOOT0 is {boot0:#x}");
    let share = options.number("share", card.vram()?)?;
    let (mut attempts, mut open) = (0, Vec::new());
    for hole in &chosen {
        let mut verdict = Verdict::default();
        let mut lab = Lab::new(card, hole.number, share, pattern.clone())?;
        let tried = (hole.attempt)(&mut lab, &mut verdict).and_then(|()| lab.alive(boot0));
        // An attempt with a failed precondition must not count as a success of the mediator.
        if let Err(error) = tried {
            verdict.open.push(format!("{error:#}"));
        }
        let Verdict { denied, contained, open: gained } = verdict;
        let outcome = match (gained.is_empty(), contained) {
            (false, _) => "open",
            (true, 0) => "denied",
            (true, _) => "contained",
        };
        println!(
            "hole={} name={} outcome={outcome} denied={denied} contained={contained} {gained:?}",
            hole.number, hole.name
        );
        attempts += denied + contained + gained.len() as u64;
        if !gained.is_empty() {
            open.push(hole.number.to_string());
        }
    }
    if !open.is_empty() {
        bail!("open: {}", open.join(","));
    }
    Ok((Counts::default(), vec![("holes", chosen.len().to_string()), ("attempts", attempts.to_string())]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_are_numbered_in_order() {
        assert!(HOLES.iter().zip(1..).all(|(hole, number)| hole.number == number));
        assert!(HOLES.len() < lab::ROOMS as usize, "each has its own VRAM");
    }

    #[test]
    fn one_gain_opens_a_hole_despite_refusals() {
        let mut verdict = Verdict::default();
        verdict.must_fault("there", lab::Ran::Fault(0x1234), 0x1000);
        verdict.must_not_run("it", lab::Ran::Nothing);
        assert_eq!((verdict.denied, verdict.contained, verdict.open.len()), (1, 1, 0));
        verdict.must_fault("elsewhere", lab::Ran::Fault(0x2000), 0x1000);
        verdict.must_fault("nothing", lab::Ran::Nothing, 0x1000);
        verdict.must_not_run("it ran", lab::Ran::Done);
        assert_eq!(verdict.open.len(), 3);
    }
}
