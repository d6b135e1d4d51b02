//! Runs random instructions. The engine must survive them, and must still work afterwards.

use super::differential::random_words;
use super::rig::{CODE, DATA, Random, Rig};
use crate::engines::{EngineError, Progress};

/// Returns a random word that is usually a valid instruction.
fn word(random: &mut Random) -> u64 {
    let mut word = random.next();
    for _ in 0..400 {
        if sm20::decode(word).is_ok() {
            break;
        }
        // Reserved bits are usually zero, so favour zero bits.
        word = random.next() & random.next() | random.next() & 0xf800_0000_0000_000f;
    }
    word
}

#[test]
fn random_programs_end_in_an_error_or_can_be_stopped() {
    let mut random = Random(0x5eed);
    let [calm, all] = random_words(20);
    let (mut ended, mut failed, mut stopped) = (0, 0, 0);
    for round in 0..2000 {
        let mut rig = Rig::new(if round % 20 == 0 { 2 } else { 0 });
        let empty = rig.load(".kernel k\n.registers 63\n.shared 4096\n.local 64\n.barriers 16\nEXIT");
        // Prepare registers that instructions may use as addresses.
        let head = sm20::assemble("S2R R0, SR_TID.X\nMOV R4, c[0][0x20]\nMOV R8, c[0][0x20]\nSSY 0x100\nMOV R12, R0");
        let mut words = head.expect("good").words;
        for _ in 0..60 {
            // Use random words, words that decode to instructions, and instructions that usually have an effect.
            let word = match round % 4 {
                0 => random.next(),
                1 => word(&mut random),
                2 => all[(random.next() % all.len() as u64) as usize],
                _ => calm[(random.next() % calm.len() as u64) as usize],
            };
            words.push(word as u32);
            if sm20::size(word as u32) == 8 {
                words.push((word >> 32) as u32);
            }
        }
        rig.write(CODE, &words);
        rig.params(&[DATA as u32]);
        rig.launch(&empty, "k", [3, 1, 1], [70, 1, 1]).expect("good");
        let mut outcome = Ok(Progress::More);
        for _ in 0..30 {
            outcome = rig.step();
            match outcome {
                Ok(Progress::More) => {}
                Ok(Progress::Elsewhere) => std::thread::yield_now(),
                Ok(Progress::Done) | Err(_) => break,
            }
        }
        match outcome {
            Ok(Progress::Done) => ended += 1,
            Ok(_) => stopped += 1,
            Err(EngineError::ShaderFault(_) | EngineError::Warp(_)) => failed += 1,
            Err(error) => panic!("{error}"),
        }
        rig.compute.reset();
        assert!(!rig.compute.pending());
    }
    let counts = format!("{ended} ended, {failed} failed, {stopped} were stopped");
    assert!(failed > 1000 && ended > 20 && stopped > 20, "{counts}");
}
