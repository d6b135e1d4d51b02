//! Tests of saved vGPUs that were modified, or that belong to a different vGPU.

use super::*;
use crate::tests::mock::Rig;
use nvspec::regs::{pbus, pfifo, pmc, ptimer};

/// Creates a vGPU with a pending interrupt, bound channels, an alarm, and a denied access.
fn rig() -> Rig {
    let mut rig = Rig::new();
    rig.enable_msi();
    rig.wr(pbus::PRAMIN_WINDOW::OFFSET, 0x12);
    for channel in 0..3 {
        rig.wr(pfifo::CHANNEL::at(channel), 0x8000_0000 | (0x100 + channel));
    }
    rig.gpu.ctxsw_timeout(0, VirtualChannelId(1), &mut rig.mock);
    rig.wr(ptimer::INTR_EN::OFFSET, 1);
    rig.wr(ptimer::ALARM_0::OFFSET, 0x1234_5678);
    rig.wr(0x60_0000, 1);
    rig
}

fn restored(edit: impl FnOnce(&mut SavedVGpu)) -> Result<VGpu, Invalid> {
    let rig = rig();
    let mut saved = rig.gpu.save();
    edit(&mut saved);
    VGpu::restored(saved, rig.gpu.config().clone())
}

fn refused(edit: impl FnOnce(&mut SavedVGpu)) -> String {
    restored(edit).expect_err("the vGPU was restored").to_string()
}

#[test]
fn restored_vgpu_does_not_repeat_interrupts() {
    let mut rig = rig();
    rig.mock.take();
    let before = (rig.gpu.interrupts().messages, rig.gpu.alarm_at());
    rig.gpu = restored(|_| {}).unwrap();
    assert_eq!((rig.gpu.interrupts().messages, rig.gpu.alarm_at()), before);
    let bound: Vec<_> = rig.gpu.bound_channels().collect();
    assert_eq!(bound, [0, 1, 2].map(VirtualChannelId));
    assert_eq!(rig.gpu.blocked_engines(), 0);
    rig.rd(pmc::INTR_0::OFFSET);
    rig.wr(pmc::INTR_EN_0::OFFSET, 1);
    assert!(rig.mock.take().is_empty(), "a call was repeated");
    assert_eq!(rig.denied().len(), 1);
}

#[test]
fn another_vgpu_is_refused() {
    let saved = rig().gpu.save();
    let larger = Rig::with(|config| config.vram_bytes *= 2);
    let error = VGpu::restored(saved.clone(), larger.gpu.config().clone()).unwrap_err().to_string();
    assert!(error.contains("a different configuration"), "{error}");
    let fewer = Rig::with(|config| config.channels = 2);
    assert!(VGpu::restored(saved, fewer.gpu.config().clone()).is_err());
}

#[test]
fn state_that_cannot_be_is_refused() {
    assert!(refused(|saved| saved.pci[0] ^= 1).contains("byte 0x0 of configuration space"));
    assert!(refused(|saved| saved.pci[0x34] = 0xff).contains("byte 0x34"));
    assert!(refused(|saved| saved.pci.truncate(256)).contains("256 bytes"));
    assert!(refused(|saved| saved.storage.push((0xffff_fffc, 1))).contains("not the offset of a stored register"));
    assert!(refused(|saved| saved.storage.insert(0, (2, 1))).contains("not the offset of a stored register"));
    assert!(refused(|saved| saved.storage.push(saved.storage[0])).contains("not in ascending order"));
    assert!(refused(|saved| saved.identity.channels = 1).contains("a different configuration"));
    // The command register can have any value that the guest can write.
    assert!(restored(|saved| saved.pci[4] ^= 6).is_ok());
}
