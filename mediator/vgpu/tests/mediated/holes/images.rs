//! Context images: PGRAPH's firmware writes the registers that an image lists, at any offset in BAR0.

use super::{A, CE0, EVIL, GOOD, ID, M2MF, PAGE, Scene, ce_copy, m2mf_copy, object, pfifo, pmc};
use card::Card;
use nvspec::fifo::VirtualChannelId;
use nvspec::regs::pgraph;
use rig::driver::{IMAGE_VA, methods, release};

/// Pages of a channel's span that contain the copy engines' images and the first two pages of PGRAPH's image.
const IMAGES: std::ops::Range<u64> = 4..8;

/// Offset of a PGRAPH state register that the mediator never writes.
const STATE: u32 = 0x0041_8810;

#[test]
fn context_images_of_a_guest_write_no_registers() {
    let mut scene = Scene::new();
    let neighbour = scene.rig.host.lock().channels().physical(GOOD, VirtualChannelId(ID)).unwrap();
    let wanted = [
        (STATE, 0x8000_0042),
        (pmc::ENABLE::OFFSET, 0),
        (pfifo::CHANNEL::at(neighbour.0.into()), 0),
        (pfifo::SCHED_EN::OFFSET, 0),
        (pgraph::INTR_EN::OFFSET, 0),
    ];
    let before = wanted.map(|(register, _)| scene.rig.card.read32(register));
    assert!(wanted.iter().zip(before).all(|((_, value), now)| *value != now), "each change would be detected");
    for bound in [false, true] {
        scene.contained("an image that lists registers", |s| {
            let mut channel = if bound { s.evil.channel(ID) } else { s.evil.prepare(ID) };
            let [_, _, image] = channel.memory();
            for (at, (register, value)) in (image + PAGE..).step_by(8).zip(wanted) {
                s.evil.guest.poke(at, register);
                s.evil.guest.poke(at + 4, value);
            }
            s.evil.guest.poke(image + 4, ((IMAGE_VA + PAGE) >> 8) as u32);
            s.evil.guest.poke(image, wanted.len() as u32);
            if !bound {
                s.evil.bind(&channel);
                s.evil.list(&[ID]);
            }
            for engine in [M2MF, CE0] {
                s.evil.submit(&mut channel, &[object(engine), methods(engine.0, 0x100, &[0])].concat());
                s.evil.wait(&channel);
            }
            assert_eq!(s.evil.guest.peek(image), wanted.len() as u32, "the card has used the guest's image");
            s.evil.unbind(&channel);
            s.evil.rewind();
        });
        let after = wanted.map(|(register, _)| scene.rig.card.read32(register));
        assert_eq!(before, after, "registers of the card");
    }
    scene.finish();
}

#[test]
fn context_images_of_the_mediator_are_out_of_works_reach() {
    let mut scene = Scene::new();
    for page in IMAGES {
        for way in 0..5 {
            let what = format!("page {page} of the span, way {way}");
            scene.denied(&what, |s| {
                let mut channel = s.evil.channel(ID);
                let own = s.evil.buffer(&channel, A, 1, 0x11);
                // Use the contexts once before the attack.
                s.evil.submit(&mut channel, &[object(M2MF), object(CE0), ce_copy(A, A, 1)].concat());
                s.evil.wait(&channel);
                let physical = s.rig.host.lock().channels().physical(EVIL, VirtualChannelId(ID)).unwrap();
                let image = ::channels::work_va(physical).0 + page * PAGE;
                let words = match way {
                    0 => ce_copy(image, A, 1),
                    1 => ce_copy(A, image, 1),
                    2 => m2mf_copy(image, A, PAGE as u32),
                    3 => m2mf_copy(A, image, PAGE as u32),
                    _ => release(image, 1),
                };
                s.evil.submit(&mut channel, &words);
                let fault = s.evil.wait_fault();
                assert_eq!((fault.instance, fault.va), (channel.instance, image), "{what}");
                assert!(s.evil.vram_holds(own, 1, 0x11), "{what}: data was read");
                s.evil.unbind(&channel);
                s.evil.rewind();
            });
        }
    }
    scene.finish();
}
