//! Tests of channels, runlists and preemption.

use super::mock::{Call, Rig, VRAM};
use crate::backend::{ChannelState, EngineStatus, Place};
use nvspec::addr::{Gpa, GuestVramAddr};
use nvspec::fifo::VirtualChannelId;

const fn channel(id: u32) -> u32 {
    0x003000 + id * 8
}

const fn state(id: u32) -> u32 {
    0x003004 + id * 8
}

fn vram(address: u64) -> Place {
    Place::Vram(GuestVramAddr(address))
}

#[test]
fn a_channel_is_bound_started_stopped_and_unbound() {
    let mut rig = Rig::new();
    rig.wr(channel(5), 0xc000_0123);
    rig.wr(state(5), 0x001f_0001);
    assert_eq!(rig.rd(channel(5)), 0xc000_0123);
    rig.mock.channel = ChannelState { loaded: true, acquire_pending: true, ..ChannelState::default() };
    assert_eq!(rig.rd(state(5)), 0x001f_1011);
    rig.mask(state(5), 1, 0);
    rig.wr(channel(5), 0);
    assert_eq!(
        rig.mock.take(),
        [Call::Bind(5, Some(vram(0x12_3000))), Call::Enable(5, true), Call::Enable(5, false), Call::Bind(5, None)]
    );
}

#[test]
fn channel_in_host_memory_shows_its_target() {
    let mut rig = Rig::new();
    rig.wr(channel(0), 0xf000_0042);
    rig.wr(channel(1), 0xe000_0042);
    rig.wr(channel(2), 0xd000_0042);
    let ram = Some(Place::Ram(Gpa(0x4_2000)));
    assert_eq!(rig.mock.take(), [Call::Bind(0, ram), Call::Bind(1, ram)]);
    assert_eq!(rig.denied(), ["pfifo.CHANNEL[2]: unsupported address target"]);
}

#[test]
fn an_instance_block_beyond_vram_is_never_bound() {
    let mut rig = Rig::new();
    let last = (VRAM >> 12) as u32 - 1;
    rig.wr(channel(1), 0xc000_0000 | last);
    rig.wr(channel(2), 0xc000_0000 | (last + 1));
    rig.wr(channel(3), 0xcfff_ffff);
    assert_eq!(rig.mock.take(), [Call::Bind(1, Some(vram(VRAM - 0x1000)))]);
    // Moving the instance block of a bound channel outside VRAM unbinds the channel.
    rig.wr(channel(1), 0xcfff_ffff);
    assert_eq!(rig.mock.take(), [Call::Bind(1, None)]);
}

#[test]
fn channels_beyond_limit_are_rejected_but_any_id_is_valid() {
    let mut rig = Rig::with(|config| config.channels = 2);
    rig.wr(channel(127), 0xc000_0001);
    rig.wr(channel(64), 0xc000_0002);
    rig.wr(channel(0), 0xc000_0003);
    rig.wr(channel(64), 0xc000_0004);
    rig.wr(channel(127), 0);
    rig.wr(channel(0), 0xc000_0003);
    assert_eq!(
        rig.mock.take(),
        [
            Call::Bind(127, Some(vram(0x1000))),
            Call::Bind(64, Some(vram(0x2000))),
            Call::Bind(64, Some(vram(0x4000))),
            Call::Bind(127, None),
            Call::Bind(0, Some(vram(0x3000))),
        ]
    );
    assert_eq!(rig.denied(), ["pfifo.CHANNEL[0]: too many channels"]);
}

#[test]
fn a_channel_started_before_it_is_bound_starts_when_it_is() {
    let mut rig = Rig::new();
    rig.wr(state(9), 1);
    assert_eq!(rig.mock.take(), []);
    rig.wr(channel(9), 0xc000_0001);
    assert_eq!(rig.mock.take(), [Call::Bind(9, Some(vram(0x1000))), Call::Enable(9, true)]);
    // Assign a new instance block to a running channel.
    rig.wr(channel(9), 0xc000_0002);
    assert_eq!(rig.mock.take(), [Call::Bind(9, Some(vram(0x2000))), Call::Enable(9, true)]);
}

#[test]
fn runlist_is_submitted_once_and_stays_pending_until_done() {
    let mut rig = Rig::new();
    rig.wr(0x002270, 0x0000_0200);
    rig.wr(0x002274, 0x01f0_0003);
    assert_eq!(rig.rd(0x00227c), 0x0010_0000, "pending");
    assert_eq!(rig.mock.take(), [Call::Runlist(vram(0x20_0000), 3)]);
    rig.gpu.runlist_done(&mut rig.mock);
    assert_eq!((rig.rd(0x00227c), rig.rd(0x002a00), rig.rd(0x002100)), (0, 0x1000_0000, 0x4000_0000));
    rig.wr(0x002a00, 0x1000_0000);
    assert_eq!((rig.rd(0x002a00), rig.rd(0x002100)), (0, 0));
}

#[test]
fn runlists_that_leave_memory_or_have_no_end_are_refused() {
    let mut rig = Rig::new();
    rig.wr(0x002270, (VRAM >> 12) as u32 - 1);
    rig.wr(0x002274, 129);
    rig.wr(0x002270, (VRAM >> 12) as u32);
    rig.wr(0x002274, 1);
    rig.wr(0x002270, 0x1000_0000);
    rig.wr(0x002274, 1);
    assert_eq!(rig.mock.take(), []);
    assert_eq!(rig.rd(0x00227c), 0);
    assert_eq!(
        rig.denied(),
        [
            "pfifo.RUNLIST: address outside VRAM",
            "pfifo.RUNLIST: unsupported address target",
            "pfifo.RUNLIST: invalid runlist"
        ]
    );
    // Submit a runlist of the maximum valid length.
    rig.wr(0x002270, (VRAM >> 12) as u32 - 1);
    rig.wr(0x002274, 128);
    rig.wr(0x002270, 0x3000_0001);
    rig.wr(0x002274, 0);
    assert_eq!(rig.mock.take(), [Call::Runlist(vram(VRAM - 0x1000), 128), Call::Runlist(Place::Ram(Gpa(0x1000)), 0)]);
}

#[test]
fn preempt_is_pending_until_the_channel_has_left() {
    let mut rig = Rig::new();
    rig.wr(channel(7), 0xc000_0001);
    rig.mock.take();
    rig.wr(0x002634, 7);
    rig.mock.preempting = true;
    assert_eq!(rig.rd(0x002634), 7 | 1 << 20);
    rig.mock.preempting = false;
    assert_eq!(rig.rd(0x002634), 7, "both kernels must see the channel number without the pending bit");
    rig.wr(0x002634, 8);
    rig.wr(0x002634, 128);
    assert_eq!(rig.rd(0x002634), 8);
    assert_eq!(rig.mock.take(), [Call::Preempt(7)], "only the bound channel must be preempted");
    assert_eq!(rig.denied(), ["pfifo.PREEMPT: no such channel"]);
}

#[test]
fn engine_status_names_only_own_channels() {
    let mut rig = Rig::new();
    assert_eq!(rig.rd(0x002640), 0);
    rig.mock.engine = EngineStatus { channel: Some(VirtualChannelId(9)), busy: true };
    assert_eq!(rig.rd(0x002654), 0x9000_0009);
    assert_eq!(rig.rd(0x002658), nvspec::regs::windows::UNCLAIMED, "a seventh engine exists");
}

#[test]
fn recovery_blocks_and_allows_engines() {
    let mut rig = Rig::new();
    rig.mask(0x002630, 0x11, 0x11);
    rig.wr(0x00262c, 0x11);
    rig.mask(0x002630, 0x01, 0);
    rig.wr(0x002630, 0xffff_ff10);
    assert_eq!(rig.rd(0x002630), 0x10);
    assert_eq!(rig.mock.take(), [Call::Block(0x11, true), Call::Block(0x01, false)]);
}

#[test]
fn userd_base_is_stored_and_not_used_by_card() {
    let mut rig = Rig::new();
    rig.wr(0x002254, 0x1000_0010);
    assert_eq!(rig.rd(0x002254), 0x1000_0010);
    assert_eq!(rig.mock.take(), []);
}

#[test]
fn reset_of_the_unit_forgets_its_channels() {
    let mut rig = Rig::new();
    rig.wr(0x000200, 0xffff_ffff);
    rig.wr(channel(3), 0xc000_0001);
    rig.wr(0x002140, 0xff);
    rig.mock.take();
    rig.mask(0x000200, 0x100, 0);
    rig.mask(0x000200, 0x100, 0x100);
    assert_eq!(rig.mock.take(), [Call::ResetFifo]);
    assert_eq!((rig.rd(channel(3)), rig.rd(0x002140)), (0, 0));
    rig.wr(channel(3), 0);
    assert_eq!(rig.mock.take(), [], "an unbound channel was reported");
}
