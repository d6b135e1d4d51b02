//! Consistency checks across parts.

use crate::RestoredVm;
use channels::Channels;
use devmodel::VGpu;
use nvspec::fifo::{CHANNELS, VirtualChannelId};
use saved_state::{Invalid, ascend};
use sched::Scheduler;
use std::collections::{BTreeMap, BTreeSet};
use vram::{ChunkTable, TenantId};

/// Checks that all parts contain the same VMs. The channel table and the scheduler may also include the mediator.
pub(crate) fn agree_on_vms(
    chunks: &ChunkTable,
    channels: &Channels,
    scheduler: &Scheduler,
    vms: impl Iterator<Item = TenantId>,
) -> Result<(), Invalid> {
    let vms: Vec<TenantId> = vms.collect();
    Invalid::unless(ascend(&vms), || "the VMs are not in ascending order".into())?;
    let with_channels = channels.vms().filter(|vm| !vm.is_mediator());
    let with_time = scheduler.vgpus().filter(|vm| !vm.is_mediator());
    let same = chunks.vms().map(|(vm, _)| vm).eq(vms.iter().copied())
        && with_channels.eq(vms.iter().copied())
        && with_time.eq(vms.iter().copied());
    Invalid::unless(same, || "the chunk owners, channels or scheduler clients differ from the VMs".into())
}

/// Checks that the guest-visible VRAM size matches the VM's number of chunks.
pub(crate) fn check_vram(vm: TenantId, gpu: &VGpu, chunks: &ChunkTable) -> Result<(), Invalid> {
    let (shown, has) = (gpu.config().vram_bytes, chunks.vm_bytes(vm));
    Invalid::unless(has == Some(shown), || format!("the guest sees {shown:#x} bytes of VRAM, but the VM has {has:x?}"))
}

/// Checks that each channel belongs to a VM and uses a page directory of this VM, and that each guest's view of its
/// channels matches their states.
pub(crate) fn check_channels(channels: &Channels, vms: &BTreeMap<TenantId, RestoredVm>) -> Result<(), Invalid> {
    for (vm, directory) in channels.directories().filter(|(vm, _)| !vm.is_mediator()) {
        let shadows = vms.get(&vm).map(|vm| &vm.spaces);
        let own = shadows.is_some_and(|spaces| spaces.ids().any(|id| spaces.directory(id) == Some(directory)));
        Invalid::unless(own, || {
            format!("a channel of VM {vm} uses the page directory at {directory}, which belongs to another VM")
        })?;
    }
    for (vm, one) in vms {
        let seen: BTreeSet<VirtualChannelId> = one.gpu.bound_channels().collect();
        let numbers = (0u8..).take(CHANNELS as usize).map(VirtualChannelId);
        for channel in numbers {
            let bound = channels.physical(*vm, channel).is_some();
            let known = bound || channels.refused(*vm, channel).is_some();
            Invalid::unless(seen.contains(&channel) == known, || {
                format!("VM {vm}: the guest's view of channel {} differs from the channel's state", channel.0)
            })?;
        }
    }
    Ok(())
}
