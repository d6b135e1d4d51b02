//! Tests channels: copies, semaphores, interrupts, and switches.

use super::driver::{
    CE0, CE1, Driver, M2MF, PAGE, acquire, ce_copy, m2mf_copy, methods, object, release, small, words,
};
use nvspec::regs::{pfifo, pmc};

const A: u64 = 0x100_0000;
const B: u64 = 0x200_0000;
const SEM: u64 = 0x300_0000;

#[test]
fn m2mf_copies_between_pages_of_a_channel() {
    let mut driver = Driver::new(&small());
    let mut channel = driver.only_channel(5);
    driver.buffer(&channel, A, 3, 1);
    let to = driver.buffer(&channel, B, 3, 2);
    driver.push(&mut channel, &words(&[object(M2MF), m2mf_copy(A, B, 3 * PAGE as u32)]));
    driver.run_until_idle();
    assert!(driver.holds(to, 3, 1));
    assert_eq!(driver.userd(&channel, 0x88), 1, "GP_GET");
    assert_eq!(driver.card.gpu().run_until_idle(), crate::fifo::Progress::Idle, "no reason to wake again");
}

#[test]
fn both_copy_engines_copy_to_and_from_host_memory() {
    for engine in [CE0, CE1] {
        let mut driver = Driver::new(&small());
        let mut channel = driver.only_channel(7);
        driver.host(0x1_0000_0000, 2);
        driver.map(channel.space, SEM, super::driver::At::Host(0x1_0000_0000), 2);
        driver.buffer(&channel, A, 2, 3);
        let to = driver.buffer(&channel, B, 2, 4);
        driver.push(&mut channel, &words(&[object(engine), ce_copy(A, SEM, 2), ce_copy(SEM, B, 2)]));
        driver.run_until_idle();
        assert!(driver.holds(to, 2, 3));
    }
}

#[test]
fn header_in_one_entry_and_data_in_the_next_are_one_packet() {
    let mut driver = Driver::new(&small());
    let mut channel = driver.only_channel(1);
    driver.buffer(&channel, A, 1, 3);
    let to = driver.buffer(&channel, B, 1, 4);
    let all = words(&[object(M2MF), m2mf_copy(A, B, PAGE as u32)]);
    for word in all {
        driver.push(&mut channel, &[word]);
        driver.run_until_idle();
    }
    assert!(driver.holds(to, 1, 3));
}

#[test]
fn preempted_channel_resumes_at_its_position() {
    let mut driver = Driver::new(&small());
    let mut channel = driver.only_channel(1);
    driver.buffer(&channel, A, 1, 3);
    let to = driver.buffer(&channel, B, 1, 4);
    let all = words(&[object(M2MF), m2mf_copy(A, B, PAGE as u32)]);
    for word in all {
        driver.push(&mut channel, &[word]);
        driver.run_until_idle();
        // Preempt the channel, so that its state is only in its instance block and context image.
        driver.wr(pfifo::PREEMPT::OFFSET, 1);
        assert_eq!(driver.rd(pfifo::PREEMPT::OFFSET), 1, "done");
        assert_eq!(driver.rd(pfifo::CHANNEL_STATE::at(1)) & 0x1000, 0, "not loaded");
    }
    assert!(driver.holds(to, 1, 3));
}

#[test]
fn release_writes_payload_and_time() {
    let mut driver = Driver::new(&small());
    let mut channel = driver.only_channel(2);
    let at = driver.buffer(&channel, SEM, 1, 9);
    driver.advance(0x1_2345_6780);
    driver.push(&mut channel, &release(SEM + 0x10, 0xcafe));
    driver.run_until_idle();
    assert_eq!(driver.peek(at + 0x10), 0xcafe);
    assert_eq!(driver.peek(at + 0x14), 0);
    assert_eq!((driver.peek(at + 0x18), driver.peek(at + 0x1c)), (0x2345_6780, 1));
    let untouched = driver.peek(at + 0x24);
    driver.push(&mut channel, &methods(0, 0x10, &[0, SEM as u32 + 0x20, 0xbeef, 2 | 1 << 24]));
    driver.run_until_idle();
    assert_eq!((driver.peek(at + 0x20), driver.peek(at + 0x24)), (0xbeef, untouched));
}

#[test]
fn acquire_waits_for_another_channel_in_every_form() {
    // Each case consists of the operation, the payload, and the value in memory before and after the release.
    let forms = [(1, 7, 6, 7), (4, 7, 6, 8), (8, 4, 3, 12), (1 | 1 << 12, 7, 6, 7), (4 | 1 << 12, 7, 0xffff_fff0, 7)];
    for (how, payload, before, after) in forms {
        let mut driver = Driver::new(&small());
        let (mut waiter, mut other) = (driver.channel(3), driver.channel(4));
        driver.submit_runlist(&[3, 4]);
        let at = driver.buffer(&waiter, SEM, 1, 9);
        driver.map(other.space, SEM, super::driver::At::Vram(at), 1);
        driver.poke(at, before);
        driver.push(&mut waiter, &words(&[acquire(SEM, payload, how), release(SEM + 0x100, 1)]));
        driver.run_until_idle();
        assert_ne!(driver.peek(at + 0x100), 1, "{how:#x} acquired too early");
        assert_ne!(driver.rd(pfifo::CHANNEL_STATE::at(3)) & 0x10, 0, "acquire pending");
        if how & (1 << 12) != 0 {
            driver.push(&mut other, &release(SEM, after));
        } else {
            // The channel keeps the PBDMA, so only the CPU can release the semaphore.
            driver.poke(at, after);
        }
        driver.advance(10_000_000);
        assert_eq!(driver.peek(at + 0x100), 1, "{how:#x} did not acquire");
    }
}

#[test]
fn non_stall_interrupt_latches_until_cleared_and_names_engine() {
    let mut driver = Driver::new(&small());
    let mut channel = driver.only_channel(2);
    driver.wr(pfifo::RUNLIST_INTR::OFFSET, u32::MAX);
    driver.wr(pfifo::INTR_EN::OFFSET, 0x7fff_ffff);
    driver.push(&mut channel, &words(&[object(CE0), methods(4, 0x20, &[0])]));
    driver.run_until_idle();
    assert_eq!(driver.rd(pfifo::NON_STALL_ID::OFFSET), 1 << 4);
    assert_eq!(driver.rd(pfifo::INTR::OFFSET), 0x8000_0000);
    assert_eq!(driver.rd(pmc::INTR_0::OFFSET), 0, "not enabled yet");
    driver.wr(pfifo::INTR_EN::OFFSET, u32::MAX);
    assert_eq!(driver.rd(pmc::INTR_0::OFFSET), pmc::INTR_0::PFIFO.mask());
    driver.wr(pfifo::NON_STALL_INTR::at(4), 1);
    assert_eq!((driver.rd(pfifo::NON_STALL_ID::OFFSET), driver.rd(pmc::INTR_0::OFFSET)), (0, 0));
}

#[test]
fn reference_and_get_pointers_are_shown_in_userd() {
    let mut driver = Driver::new(&small());
    let mut channel = driver.only_channel(2);
    driver.push(&mut channel, &methods(0, 0x50, &[0x77]));
    driver.run_until_idle();
    assert_eq!(driver.userd(&channel, 0x48), 0x77);
    assert_eq!(driver.userd(&channel, 0x44), super::driver::PUSH_VA as u32 + 8);
    assert_eq!(driver.userd(&channel, 0x58), super::driver::PUSH_VA as u32);
}

#[test]
fn channels_on_the_runlist_take_turns_and_keep_their_state() {
    let mut driver = Driver::new(&small());
    let mut channels = [driver.channel(10), driver.channel(11), driver.channel(12)];
    driver.submit_runlist(&[10, 11, 12]);
    let mut targets = Vec::new();
    for (index, channel) in channels.iter_mut().enumerate() {
        let seed = index as u32;
        driver.buffer(channel, A, 1, seed);
        targets.push(driver.buffer(channel, B, 1, 99));
        // Send all of the copies' methods except the launches.
        let copy = m2mf_copy(A, B, PAGE as u32);
        driver.push(channel, &words(&[object(M2MF), copy[..copy.len() - 2].to_vec()]));
    }
    driver.run_until_idle();
    // Then send the launches in the opposite order. Each channel must use its own addresses.
    for channel in channels.iter_mut().rev() {
        driver.push(channel, &methods(2, 0x300, &[0x0010_0110]));
        driver.run_until_idle();
    }
    for (index, at) in targets.into_iter().enumerate() {
        assert!(driver.holds(at, 1, index as u32), "channel {index}");
    }
}

#[test]
fn channel_off_runlist_or_disabled_does_nothing() {
    let mut driver = Driver::new(&small());
    let mut channel = driver.channel(9);
    let at = driver.buffer(&channel, SEM, 1, 9);
    driver.push(&mut channel, &release(SEM, 1));
    driver.run_until_idle();
    assert_ne!(driver.peek(at), 1);
    driver.wr(pfifo::CHANNEL_STATE::at(9), 0x001f_0000);
    driver.submit_runlist(&[9]);
    driver.run_until_idle();
    assert_ne!(driver.peek(at), 1);
    driver.wr(pfifo::CHANNEL_STATE::at(9), 0x001f_0001);
    driver.run_until_idle();
    assert_eq!(driver.peek(at), 1);
    assert_eq!(driver.rd(pfifo::RUNLIST_INTR::OFFSET), 1 << 28);
}

#[test]
fn runlist_in_host_memory_is_taken() {
    let mut driver = Driver::new(&small());
    let mut channel = driver.channel(9);
    let at = driver.buffer(&channel, SEM, 1, 9);
    let region = driver.host(0x4000_0000, 1);
    use vm_memory::{Bytes, VolatileMemory};
    region.as_volatile_slice().write_slice(&(9u64 | 4 << 32).to_le_bytes(), 0).expect("within");
    driver.wr(pfifo::RUNLIST_BASE::OFFSET, 3 << 28 | 0x4_0000);
    driver.wr(pfifo::RUNLIST::OFFSET, 0x01f0_0001);
    driver.push(&mut channel, &release(SEM, 1));
    driver.run_until_idle();
    assert_eq!(driver.peek(at), 1);
}

#[test]
fn doorbell_in_host_memory_is_polled() {
    let mut driver = Driver::new(&small());
    let mut channel = driver.channel(9);
    let at = driver.buffer(&channel, SEM, 1, 9);
    let region = driver.host(0x4000_0000, 1);
    driver.poke(channel.instance + 8, 0x4000_0002);
    driver.submit_runlist(&[9]);
    driver.run_until_idle();
    driver.queue(&mut channel, &release(SEM, 1));
    use vm_memory::{Bytes, VolatileMemory};
    region.as_volatile_slice().write_slice(&1u32.to_le_bytes(), 0x8c).expect("within");
    driver.advance(1_000_000);
    assert_eq!(driver.peek(at), 1);
}

#[test]
fn doorbell_rung_by_a_copy_is_seen() {
    let mut driver = Driver::new(&small());
    let (mut writer, mut other) = (driver.channel(1), driver.channel(2));
    driver.submit_runlist(&[1, 2]);
    driver.run_until_idle();
    let at = driver.buffer(&other, SEM, 1, 9);
    driver.queue(&mut other, &release(SEM, 1));
    // The writer maps the other channel's USERD page, and releases a semaphore at the page's GP_PUT.
    let userd = u64::from(driver.peek(other.instance + 8)) & !0xfff;
    driver.map(writer.space, A, super::driver::At::Vram(userd), 1);
    driver.push(&mut writer, &methods(0, 0x10, &[0, A as u32 + 0x8c, 1, 2 | 1 << 24]));
    driver.run_until_idle();
    assert_eq!(driver.peek(at), 1);
}

#[test]
fn channel_removed_from_runlist_unloads_before_list_is_done() {
    let mut driver = Driver::new(&small());
    let mut channel = driver.only_channel(6);
    driver.push(&mut channel, &object(M2MF));
    driver.run_until_idle();
    assert_ne!(driver.rd(pfifo::CHANNEL_STATE::at(6)) & 0x1000, 0, "loaded");
    driver.wr(pfifo::RUNLIST_INTR::OFFSET, u32::MAX);
    driver.submit_runlist(&[]);
    assert_eq!(driver.rd(pfifo::RUNLIST_INTR::OFFSET), 1 << 28);
    assert_eq!(driver.rd(pfifo::CHANNEL_STATE::at(6)) & 0x1000, 0);
    assert_eq!(driver.peek(channel.instance + 0x14), 1, "GP_GET was saved");
}

#[test]
fn inline_data_continues_after_preemption_in_its_middle() {
    let mut driver = Driver::new(&small());
    let mut channel = driver.only_channel(1);
    let to = driver.buffer(&channel, B, 1, 4);
    let mut head = methods(2, 0x238, &[0, B as u32]);
    head.extend(methods(2, 0x318, &[8, 8, 1]));
    head.extend(methods(2, 0x300, &[0x0010_0111]));
    driver.push(&mut channel, &words(&[object(M2MF), head, vec![3 << 29 | 2 << 16 | 2 << 13 | 0x304 >> 2, 0xa1]]));
    driver.run_until_idle();
    driver.wr(pfifo::PREEMPT::OFFSET, 1);
    driver.push(&mut channel, &[0xa2]);
    driver.run_until_idle();
    assert_eq!((driver.peek(to), driver.peek(to + 4)), (0xa1, 0xa2));
}

#[test]
fn context_image_register_list_is_written_once_across_bar0() {
    let mut driver = Driver::new(&small());
    let mut channel = driver.only_channel(1);
    let list = driver.buffer(&channel, SEM, 1, 4);
    // Access a state register, a register with behaviour, a register of another unit, an undeclared offset, and an
    // offset beyond BAR0.
    let unit = pmc::ENABLE::CE0.mask();
    for (index, value) in
        (0..).zip([0x0041_8810, 0x8000_0042, 0x0000_0200, !unit, 0x0040_9500, 0x1234, 0x0040_9501, 1, 0x0140_9500, 1])
    {
        driver.poke(list + 4 * index, value);
    }
    driver.poke(channel.image, 5);
    driver.poke(channel.image + 4, (SEM >> 8) as u32);
    driver.push(&mut channel, &words(&[object(M2MF), methods(M2MF.0, 0x100, &[0])]));
    driver.run_until_idle();
    assert_eq!(driver.rd(0x0041_8810), 0x8000_0042);
    assert_eq!(driver.rd(pmc::ENABLE::OFFSET), !unit);
    assert_eq!(driver.rd(nvspec::regs::fecs::COMMAND_DATA::OFFSET), 0x1234);
    assert_eq!(driver.peek(channel.image), 0);
    // The channel still works.
    driver.push(&mut channel, &release(SEM, 0xcafe));
    driver.run_until_idle();
    assert_eq!(driver.peek(list), 0xcafe);
}

#[test]
fn channels_with_nothing_to_fetch_do_not_hide_one_that_has() {
    let mut driver = Driver::new(&small());
    let mut channels: Vec<_> = (0..8).map(|id| driver.channel(id)).collect();
    let ids: Vec<u8> = channels.iter().map(|channel| channel.id).collect();
    for worker in &mut channels {
        let at = driver.buffer(worker, SEM, 1, 9);
        // The runlist wakes all channels, but only one of them has work.
        driver.push(worker, &release(SEM, 0xcafe));
        driver.submit_runlist(&ids);
        driver.run_until_idle();
        assert_eq!(driver.peek(at), 0xcafe, "channel {}", worker.id);
    }
}
