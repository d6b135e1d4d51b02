//! Attacks that run while a neighbour works on the same engine.

use super::{A, B, CE0, CE1, ID, M2MF, PAGE, Scene, ce_copy, m2mf_copy, object};
use nvspec::regs::pfifo;
use rig::driver::{IMAGE_VA, methods};

#[test]
fn neighbour_copies_stay_whole_while_attacker_faults() {
    let mut scene = Scene::new();
    for round in 0..200 {
        let mut channel = scene.evil.channel(ID);
        scene.evil.buffer(&channel, A, 1, 1);
        let bad = match round % 3 {
            0 => [object(CE0), ce_copy(A, B, 1)].concat(),
            1 => [object(CE1), ce_copy(B, A, 1)].concat(),
            _ => [object(M2MF), m2mf_copy(A, B, PAGE as u32)].concat(),
        };
        scene.evil.submit(&mut channel, &bad);
        // Do not wait, so that the neighbour works while the fault is handled.
        scene.good.work(&format!("round {round}"));
        scene.evil.wait_fault();
        scene.good.work(&format!("round {round}, after the fault"));
        scene.evil.unbind(&channel);
        scene.evil.rewind();
    }
    scene.finish();
}

#[test]
fn neighbour_copies_stay_whole_while_attacker_cycles_channels() {
    let mut scene = Scene::new();
    for round in 0..200u32 {
        let mut channel = scene.evil.channel(ID);
        scene.evil.buffer(&channel, A, 16, 1);
        scene.evil.buffer(&channel, B, 16, 2);
        for _ in 0..4 {
            scene.evil.queue(&mut channel, &[object(CE0), ce_copy(A, B, 16), object(CE1), ce_copy(B, A, 16)].concat());
        }
        scene.evil.submit(&mut channel, &[object(M2MF), m2mf_copy(A, B, PAGE as u32)].concat());
        match round % 4 {
            0 => scene.evil.guest.wr(pfifo::PREEMPT::OFFSET, ID.into()),
            1 => scene.evil.guest.wr(pfifo::CHANNEL_STATE::at(ID.into()), 0),
            2 => scene.evil.list(&[]),
            _ => {}
        }
        scene.good.work(&format!("round {round}"));
        scene.evil.unbind(&channel);
        scene.good.work(&format!("round {round}, after the channel's end"));
        scene.evil.rewind();
    }
    scene.finish();
}

/// Runs one attack: removes the attacker's images, tables, target buffer or nothing, depending on `round`, and unbinds
/// the channel immediately after another submission. In every third round, the first submission may still be in
/// progress.
fn provoke(evil: &mut super::Driver, round: u32) {
    let mut channel = evil.channel(ID);
    evil.buffer(&channel, A, 16, 1);
    evil.buffer(&channel, B, 16, 2);
    let engine = if round.is_multiple_of(2) { CE0 } else { CE1 };
    evil.submit(&mut channel, &[object(engine), ce_copy(A, B, 16), object(M2MF), m2mf_copy(A, B, 64)].concat());
    if !round.is_multiple_of(3) {
        evil.wait(&channel);
    }
    match round % 5 {
        0 => (0..16).for_each(|page| evil.pte(channel.space, IMAGE_VA + page * PAGE, 0, 0)),
        1 => evil.guest.vram_write(channel.space.table, &[0; 0x4000]),
        2 => evil.guest.poke(channel.space.directory + 4, 0),
        3 => (0..16).for_each(|page| evil.pte(channel.space, B + page * PAGE, 0, 0)),
        _ => {}
    }
    evil.flush();
    evil.submit(&mut channel, &[object(engine), ce_copy(A, B, 16)].concat());
    evil.unbind(&channel);
    evil.service();
    evil.faults.clear();
    evil.rewind();
}

#[test]
fn contexts_are_saved_wherever_the_guest_has_its_images() {
    for engine in [CE0, CE1, M2MF] {
        let mut scene = Scene::new();
        let mut channel = scene.evil.channel(ID);
        scene.evil.submit(&mut channel, &[object(engine), methods(engine.0, 0x100, &[0])].concat());
        scene.evil.wait(&channel);
        // The engine has the attacker's context loaded, and saves it when the next channel is loaded. It saves it to an
        // image that belongs to the mediator, so the guest's own image is not needed.
        for page in 0..16 {
            scene.evil.pte(channel.space, IMAGE_VA + page * PAGE, 0, 0);
        }
        scene.evil.flush();
        scene.good.work("a guest whose image is gone");
        scene.evil.submit(&mut channel, &methods(engine.0, 0x100, &[0]));
        scene.evil.wait(&channel);
        assert_eq!(scene.evil.faults, []);
        scene.finish();
    }
}

#[test]
fn neighbours_copies_are_whole_while_the_attackers_tables_go() {
    let mut scene = Scene::new();
    let Scene { evil, good, .. } = &mut scene;
    std::thread::scope(|scope| {
        let attack = scope.spawn(|| (0..300).for_each(|round| provoke(evil, round)));
        while !attack.is_finished() {
            good.work("next to the attacker");
        }
    });
    scene.finish();
}
