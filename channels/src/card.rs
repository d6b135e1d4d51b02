//! Card commands, with one function for each step in a channel's life. No function waits.

use crate::Host;
use crate::block::{BLOCK, CONTEXTS};
use crate::image::{self, Golden, image_vas};
use crate::instance::context_words;
use crate::work::Span;
use crate::{Layout, Stuck};
use nvspec::addr::{GpuVa, Target, VramAddr};
use nvspec::fifo::{ChannelId, RunlistEntry};
use nvspec::instance::{INSTANCE_BYTES, userd};
use nvspec::regs::pfifo;

/// Maximum number of polls after a request for a channel to leave its engines. On hardware, a register read takes about
/// a microsecond, and a channel without work in progress leaves within a few microseconds. Waiting for a channel with
/// work would delay other channels.
const MAX_LEAVE_POLLS: u32 = 16;
/// Flags of a runlist entry, as drivers write them.
const RUNLIST_FLAGS: u32 = 4;
/// Number of attempts to read both halves of a USERD address consistently. The high half changes only once every 4 GiB.
const WIDE_READS: u32 = 4;

impl Layout {
    /// Returns the VRAM address of a physical channel's instance block.
    #[must_use]
    pub fn instance(&self, channel: ChannelId) -> VramAddr {
        self.instances.offset(u64::from(channel.0).wrapping_mul(INSTANCE_BYTES))
    }

    /// Returns the VRAM address of a physical channel's USERD page.
    #[must_use]
    pub fn userd(&self, channel: ChannelId) -> VramAddr {
        self.userd.offset(u64::from(channel.0).wrapping_mul(userd::BYTES))
    }
}

/// Writes a channel's instance block, clears its USERD page and work area, and registers the channel with the card as
/// stopped.
pub(crate) fn bind(host: &mut impl Host, layout: &Layout, channel: ChannelId, block: &[u8; BLOCK]) {
    host.vram_write(layout.userd(channel), &[0; BLOCK]);
    for (_, page, _) in layout.work_pages(channel, channel.into()) {
        host.vram_write(page, &[0; BLOCK]);
    }
    host.vram_write(layout.instance(channel), block);
    host.vram_flush();
    make_known(host, layout, channel);
}

/// Registers a channel with the card as stopped. The channel's structures must be in VRAM.
pub(crate) fn make_known(host: &mut impl Host, layout: &Layout, channel: ChannelId) {
    let instance = layout.instance(channel);
    host.write32(
        pfifo::CHANNEL::at(channel.0.into()),
        pfifo::CHANNEL::VALID.mask()
            | pfifo::CHANNEL::POLL_USERD.mask()
            | pfifo::CHANNEL::TARGET.encode(Target::Vram.bits())
            | pfifo::CHANNEL::ADDRESS.encode(page_number(instance)),
    );
}

/// Removes a channel from the card's channel table. The card must no longer use the channel's memory.
pub(crate) fn unbind(host: &mut impl Host, channel: ChannelId) {
    host.write32(pfifo::CHANNEL::at(channel.0.into()), 0);
}

/// Clears a channel's instance block and USERD page.
pub(crate) fn clear(host: &mut impl Host, layout: &Layout, channel: ChannelId) {
    host.vram_write(layout.instance(channel), &[0; BLOCK]);
    host.vram_write(layout.userd(channel), &[0; BLOCK]);
    host.vram_flush();
}

/// Permits the card to schedule a channel on any engine.
pub(crate) fn start(host: &mut impl Host, channel: ChannelId) {
    let value = pfifo::CHANNEL_STATE::ENABLED.mask() | pfifo::CHANNEL_STATE::ENGINES.mask();
    host.write32(pfifo::CHANNEL_STATE::at(channel.0.into()), value);
}

/// Prevents the card from scheduling a channel.
pub(crate) fn stop(host: &mut impl Host, channel: ChannelId) {
    let register = pfifo::CHANNEL_STATE::at(channel.0.into());
    let state = host.read32(register);
    host.write32(register, pfifo::CHANNEL_STATE::ENABLED.with(state, 0));
}

/// Starts removing a channel from its engines. Does not wait.
pub(crate) fn ask_kick(host: &mut impl Host, channel: ChannelId) {
    host.write32(pfifo::PREEMPT::OFFSET, pfifo::PREEMPT::CHANNEL.encode(channel.0.into()));
}

/// Returns the channel of the last removal request, and true if that request is still pending.
pub(crate) fn kicked(host: &mut impl Host) -> (ChannelId, bool) {
    let state = host.read32(pfifo::PREEMPT::OFFSET);
    let channel = u8::try_from(pfifo::PREEMPT::CHANNEL.get(state)).unwrap_or(u8::MAX);
    (ChannelId(channel), pfifo::PREEMPT::PENDING.is_set(state))
}

/// Starts removing a channel from its engines, and polls briefly. Returns an error if the channel has not left by then.
pub(crate) fn kick(host: &mut impl Host, channel: ChannelId) -> Result<(), Stuck> {
    ask_kick(host, channel);
    if (0..MAX_LEAVE_POLLS).any(|_| !kicked(host).1) { Ok(()) } else { Err(Stuck { channel }) }
}

/// Writes a runlist to `page` and submits it. The card reports the list as pending while a removed channel is still
/// working. This function does not wait for completion.
// GUESS: the card fetches a submitted list even while the previous list is pending, as the software card does.
pub(crate) fn submit(host: &mut impl Host, page: VramAddr, channels: &[ChannelId]) {
    let bytes: Vec<u8> = channels
        .iter()
        .flat_map(|channel| {
            let entry = RunlistEntry::new().with_channel(channel.0.into()).with_flags(RUNLIST_FLAGS);
            u64::from(entry).to_le_bytes()
        })
        .collect();
    host.vram_write(page, &bytes);
    host.vram_flush();
    let length = u32::try_from(channels.len()).unwrap_or(0);
    host.write32(
        pfifo::RUNLIST_BASE::OFFSET,
        pfifo::RUNLIST_BASE::TARGET.encode(Target::Vram.bits())
            | pfifo::RUNLIST_BASE::ADDRESS.encode(page_number(page)),
    );
    host.write32(pfifo::RUNLIST::OFFSET, pfifo::RUNLIST::ENGINES.mask() | pfifo::RUNLIST::LENGTH.encode(length));
}

/// Updates the context pointers in the channel's block after the guest has changed its own pointers. The guest's
/// pointers only determine which contexts exist. A context at a new address is treated as a new one.
pub(crate) fn set_contexts(
    host: &mut impl Host,
    layout: &Layout,
    channel: ChannelId,
    span: Span,
    golden: &Golden,
    old: &[Option<GpuVa>; 3],
    new: &[Option<GpuVa>; 3],
) {
    let changes = CONTEXTS.into_iter().zip(image_vas(span)).zip(old.iter().zip(new));
    let [graph, ce0, ce1] = new;
    let [old_graph, old_ce0, old_ce1] = old;
    let is_fresh = |old: &Option<GpuVa>, new: &Option<GpuVa>| new.is_some() && old != new;
    let fresh = [is_fresh(old_graph, graph), is_fresh(old_ce0, ce0), is_fresh(old_ce1, ce1)];
    image::renew(host, layout, channel, golden, fresh);
    for ((offset, image), (_, new)) in changes.filter(|(_, (old, new))| old.is_some() != new.is_some()) {
        let words = context_words(new.map(|_| image));
        host.vram_write(layout.instance(channel).offset(offset), &words.to_le_bytes());
    }
    host.vram_flush();
}

/// Returns the channel that an engine reports as running, which is not necessarily bound.
pub(crate) fn working_for(host: &mut impl Host, unit: u32) -> Option<ChannelId> {
    let status = host.read32(pfifo::ENGINE_STATUS::at(unit));
    let channel = u8::try_from(pfifo::ENGINE_STATUS::CHANNEL.get(status)).ok()?;
    pfifo::ENGINE_STATUS::BUSY.is_set(status).then_some(ChannelId(channel))
}

/// Returns true if a channel is loaded in a PBDMA.
pub(crate) fn is_loaded(host: &mut impl Host, channel: ChannelId) -> bool {
    pfifo::CHANNEL_STATE::LOADED.is_set(state(host, channel))
}

/// Reads a channel's state register.
pub(crate) fn state(host: &mut impl Host, channel: ChannelId) -> u32 {
    host.read32(pfifo::CHANNEL_STATE::at(channel.0.into()))
}

/// Returns an address that is stored in two dwords of a channel's USERD. The card may change it between the two reads.
pub(crate) fn userd_wide(host: &mut impl Host, channel: ChannelId, low: u64, high: u64) -> u64 {
    let mut above = host.userd_read(channel, high);
    let mut below = 0;
    for _ in 0..WIDE_READS {
        below = host.userd_read(channel, low);
        let again = host.userd_read(channel, high);
        if std::mem::replace(&mut above, again) == again {
            break;
        }
    }
    u64::from(above) << 32 | u64::from(below)
}

fn page_number(address: VramAddr) -> u32 {
    // VRAM addresses have 40 bits, and the registers contain a 28-bit page number.
    u32::try_from(address.0 >> 12).unwrap_or(0)
}
