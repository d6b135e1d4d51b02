//! Saved form of the channels. Their data on the card (instance blocks, rings, records, images) remains in VRAM.

use super::{Bound, Channels, Slot, Vm};
use crate::episode::{Episode, SavedEpisode, Watchdog};
use crate::image::{GRAPH_IMAGE_MAX, Golden};
use crate::preempt::Preemptions;
use crate::refuse::Refused;
use crate::ring::{COUNT_MAX, Ring, SavedRing};
use crate::state::{Gate, Graphics, Permit, RequestedState, SavedWords};
use crate::work::Span;
use crate::{Layout, Pause, Place, RunState, Submission, TenantId};
use nvspec::addr::{Gpa, GpuVa, GuestVramAddr, SMALL_PAGE, VA_BITS, VramAddr};
use nvspec::fifo::{CHANNELS, ChannelId, VirtualChannelId, engine};
use nvspec::instance::ramfc;
use saved_state::{Invalid, ascend, only_version};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Saved form of a card's physical channels.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedChannels {
    pub(crate) layout: SavedLayout,
    /// Contents of the image of a new PGRAPH context.
    pub(crate) golden: Vec<u8>,
    /// Physical channels, sorted by number.
    pub(crate) slots: Vec<SavedSlot>,
    /// VMs, sorted by number.
    pub(crate) vms: Vec<SavedVm>,
    second_page: bool,
    pub(crate) next_slot: u8,
    pub(crate) serial: u64,
    pub(crate) submissions: u64,
    deferred: bool,
    hang_limit: u64,
    /// Episode of each engine, by index.
    pub(crate) episodes: Vec<Option<SavedEpisode>>,
    pub(crate) preemptions: SavedPreemptions,
    gate: SavedGate,
}

only_version!(SavedChannels, "channels", 2);

/// VMs that may use PGRAPH.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum SavedGate {
    Open,
    Only(Option<u32>),
}

/// Addresses of the host's structures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedLayout {
    pub(crate) instances: u64,
    userd: u64,
    runlists: [u64; 2],
    work: u64,
    images: u64,
    graph_image: u64,
}

/// Saved form of a physical channel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum SavedSlot {
    Free,
    Bound(Box<SavedBound>),
    Stuck { vm: u32, directory: u64, stranded: bool, span: u8 },
}

/// Saved form of a binding. The state on the card is derived from the guest's request and the host's permission.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedBound {
    pub(crate) vm: u32,
    pub(crate) channel: u8,
    pub(crate) serial: u64,
    pub(crate) instance: SavedPlace,
    pub(crate) directory: u64,
    pub(crate) userd: u64,
    pub(crate) contexts: [Option<u64>; 3],
    pub(crate) next_contexts: Option<[Option<u64>; 3]>,
    pub(crate) enabled: bool,
    pub(crate) permit: SavedPermit,
    pub(crate) stranded: bool,
    pub(crate) still: Option<SavedEpisode>,
    pub(crate) ring: SavedRing,
    /// Number of the channel's span in its directory's address space.
    pub(crate) span: u8,
}

/// The host's permission for a channel to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum SavedPermit {
    Granted,
    Withheld,
    Ended,
}

/// Location of a guest structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SavedPlace {
    /// Address in guest VRAM.
    Vram(u64),
    /// Address in guest RAM.
    Ram(u64),
}

/// Saved form of a VM. Its bound channels are in the slots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedVm {
    pub(crate) vm: u32,
    pub(crate) cap: u32,
    pub(crate) paused: u8,
    pub(crate) trusted: bool,
    pub(crate) list: Vec<u8>,
    pub(crate) unlisted: Vec<u8>,
    /// Rejected channels, sorted by guest channel number.
    pub(crate) refused: Vec<(u8, SavedRefused)>,
    /// Guest channel numbers of unbound channels, with GP_GET, GP_FETCH and GP_PUT.
    pub(crate) saved: Vec<(u8, [u32; 3])>,
    news: u32,
    told: bool,
    hang_limit: Option<u64>,
    next_look: u8,
}

/// Saved form of a guest channel whose bind was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedRefused {
    instance: SavedPlace,
    userd: Option<u64>,
    told: bool,
}

/// Saved form of pending preemptions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedPreemptions {
    pub(crate) waiting: Vec<u8>,
    pub(crate) asked: bool,
    looks: u32,
}

impl Channels {
    /// Saves the channels. Work that has started continues in the meantime, unless the VMs are paused and off the
    /// engines.
    #[must_use]
    pub fn save(&self) -> SavedChannels {
        let Self {
            layout,
            golden,
            slots,
            vms,
            next_page,
            next_slot,
            serial,
            submissions,
            deferred,
            watchdog,
            preemptions: Preemptions { waiting, asked, looks },
            gate,
        } = self;
        let waiting = waiting.iter().map(|channel| channel.0).collect();
        SavedChannels {
            layout: layout.save(),
            golden: golden.bytes().to_vec(),
            slots: slots.iter().map(Slot::save).collect(),
            vms: vms.iter().map(|(vm, record)| record.save(*vm)).collect(),
            second_page: *next_page != 0,
            next_slot: u8::try_from(next_slot.checked_rem(slots.len()).unwrap_or(0)).unwrap_or(0),
            serial: *serial,
            submissions: *submissions,
            deferred: *deferred,
            hang_limit: watchdog.limit_ns(),
            episodes: watchdog.save(),
            preemptions: SavedPreemptions { waiting, asked: *asked, looks: *looks },
            gate: match gate {
                Gate::Open => SavedGate::Open,
                Gate::Only(vm) => SavedGate::Only(vm.map(|vm| vm.0)),
            },
        }
    }

    /// Returns the VMs that may have channels, sorted by number.
    pub fn vms(&self) -> impl Iterator<Item = TenantId> {
        self.vms.keys().copied()
    }

    /// Returns the shadow directories of bound and stuck channels, with their VMs. In restored shadow tables, these
    /// directories must belong to these VMs.
    pub fn directories(&self) -> impl Iterator<Item = (TenantId, VramAddr)> {
        self.slots.iter().filter_map(|slot| match slot {
            Slot::Free => None,
            Slot::Bound(bound) => Some((bound.vm, bound.directory)),
            Slot::Stuck { vm, directory, .. } => Some((*vm, *directory)),
        })
    }

    /// Returns the physical channels to which a VM's channels are bound.
    pub fn bound_of(&self, vm: TenantId) -> impl Iterator<Item = ChannelId> {
        self.vms.get(&vm).into_iter().flat_map(|vm| vm.channels.values().copied())
    }

    /// Returns the shadow directory that a VM's bound channel uses.
    #[must_use]
    pub fn directory_of(&self, vm: TenantId, channel: VirtualChannelId) -> Option<VramAddr> {
        self.bound(self.physical(vm, channel)?).map(|bound| bound.directory)
    }

    /// Returns true if a VM's channels are paused for the given reason.
    #[must_use]
    pub fn is_paused(&self, vm: TenantId, why: Pause) -> bool {
        self.vms.get(&vm).is_some_and(|vm| vm.paused & why.bit() != 0)
    }

    /// Returns the submissions in flight, with their channels.
    pub fn flights(&self) -> impl Iterator<Item = (TenantId, ChannelId, Submission)> {
        let bounds = (0..).zip(&self.slots).filter_map(|(number, slot)| match slot {
            Slot::Bound(bound) => Some((ChannelId(number), bound)),
            Slot::Free | Slot::Stuck { .. } => None,
        });
        bounds.flat_map(|(physical, bound)| {
            bound.ring.records.iter().map(move |record| (bound.vm, physical, record.submission))
        })
    }

    /// Restores the channels of a card with host structures at `layout`. The caller must check that each directory is a
    /// shadow of its VM ([`Self::directories`]).
    ///
    /// # Errors
    /// Returns an error if the saved channels are invalid.
    pub fn restored(saved: SavedChannels, layout: Layout) -> Result<Self, Invalid> {
        let SavedChannels {
            layout: at,
            golden,
            slots,
            vms,
            second_page,
            next_slot,
            serial,
            submissions,
            deferred,
            hang_limit,
            episodes,
            preemptions,
            gate,
        } = saved;
        Invalid::unless(at == layout.save(), || "the host's structures have other addresses on the card".into())?;
        let golden = Some(golden).filter(|golden| golden.len() as u64 <= GRAPH_IMAGE_MAX).and_then(Golden::restored);
        let golden = golden.ok_or_else(|| Invalid::new("a context image is too long, or lists registers"))?;
        Invalid::unless(slots.len() == CHANNELS as usize, || format!("the number of channels is not {CHANNELS}"))?;
        Invalid::unless(u32::from(next_slot) < CHANNELS, || format!("channel {next_slot} does not exist"))?;
        Invalid::unless(serial <= COUNT_MAX && submissions <= COUNT_MAX, || {
            "the number of bindings or submissions is too large".into()
        })?;
        Invalid::unless(ascend(vms.iter().map(|vm| vm.vm)), || "the VMs are not in order".into())?;
        let mut own = of_vms(&slots)?;
        let mut records = BTreeMap::new();
        for vm in vms {
            let id = TenantId(vm.vm);
            let channels = own.remove(&id).unwrap_or_default();
            records.insert(id, Vm::restored(vm, channels, &slots)?);
        }
        if let Some(vm) = own.keys().next() {
            return Err(Invalid::new(format_args!("channels are bound for VM {vm}, which does not exist")));
        }
        check_spans(&slots)?;
        let restored = |slot| Slot::restored(slot, &records, serial, submissions);
        let slots = slots.into_iter().map(restored).collect::<Result<Vec<_>, _>>()?;
        check_submissions(&slots)?;
        let SavedPreemptions { waiting, asked, looks } = preemptions;
        let each = waiting.iter().copied().collect::<BTreeSet<_>>().len() == waiting.len();
        let numbers = waiting.iter().all(|channel| u32::from(*channel) < CHANNELS);
        Invalid::unless(each && numbers && (!asked || !waiting.is_empty()), || {
            "the pending preemptions contain a channel twice, or one that does not exist".into()
        })?;
        let waiting = waiting.into_iter().map(ChannelId).collect();
        // The admitted VM may no longer exist.
        let gate = match gate {
            SavedGate::Open => Gate::Open,
            SavedGate::Only(vm) => Gate::Only(vm.map(TenantId)),
        };
        Ok(Self {
            layout,
            golden,
            slots,
            vms: records,
            next_page: usize::from(second_page),
            next_slot: next_slot.into(),
            serial,
            submissions,
            deferred,
            watchdog: Watchdog::restored(hang_limit, &episodes)?,
            preemptions: Preemptions { waiting, asked, looks },
            gate,
        })
    }
}

/// Returns each VM's bound channels, by guest channel number.
fn of_vms(slots: &[SavedSlot]) -> Result<BTreeMap<TenantId, BTreeMap<u8, ChannelId>>, Invalid> {
    let mut own = BTreeMap::<TenantId, BTreeMap<u8, ChannelId>>::new();
    for (slot, number) in slots.iter().zip(0..) {
        let SavedSlot::Bound(bound) = slot else { continue };
        Invalid::unless(u32::from(bound.channel) < CHANNELS, || format!("channel {} does not exist", bound.channel))?;
        let earlier = own.entry(TenantId(bound.vm)).or_default().insert(bound.channel, ChannelId(number));
        Invalid::unless(earlier.is_none(), || format!("channel {} of VM {} is bound twice", bound.channel, bound.vm))?;
    }
    Ok(own)
}

/// Checks that no two submissions have the same number.
fn check_submissions(slots: &[Slot]) -> Result<(), Invalid> {
    let mut seen = BTreeSet::new();
    let records = slots.iter().filter_map(|slot| match slot {
        Slot::Bound(bound) => Some(bound.ring.records.iter()),
        Slot::Free | Slot::Stuck { .. } => None,
    });
    let twice = records.flatten().find(|record| !seen.insert(record.submission));
    Invalid::unless(twice.is_none(), || "two submissions have the same number".into())
}

/// Checks that no two channels of a VM have the same span.
fn check_spans(slots: &[SavedSlot]) -> Result<(), Invalid> {
    let mut seen = BTreeSet::new();
    let spans = slots.iter().filter_map(|slot| match slot {
        SavedSlot::Bound(bound) => Some((bound.vm, bound.span)),
        SavedSlot::Stuck { vm, span, .. } => Some((*vm, *span)),
        SavedSlot::Free => None,
    });
    for (vm, span) in spans {
        Invalid::unless(u32::from(span) < CHANNELS && seen.insert((vm, span)), || {
            format!("VM {vm}: two channels have the same span, or a span is invalid ({span})")
        })?;
    }
    Ok(())
}

impl Layout {
    fn save(&self) -> SavedLayout {
        let Self { instances, userd, runlists: [first, second], work, images, graph_image } = *self;
        let (instances, userd, work, images) = (instances.0, userd.0, work.0, images.0);
        SavedLayout { instances, userd, runlists: [first.0, second.0], work, images, graph_image }
    }
}

impl Slot {
    fn save(&self) -> SavedSlot {
        match self {
            Self::Free => SavedSlot::Free,
            Self::Bound(bound) => SavedSlot::Bound(Box::new(bound.save())),
            Self::Stuck { vm, directory, span, stranded } => {
                SavedSlot::Stuck { vm: vm.0, directory: directory.0, stranded: *stranded, span: span.0 }
            }
        }
    }

    fn restored(
        saved: SavedSlot,
        vms: &BTreeMap<TenantId, Vm>,
        serial: u64,
        submissions: u64,
    ) -> Result<Self, Invalid> {
        match saved {
            SavedSlot::Free => Ok(Self::Free),
            SavedSlot::Bound(bound) => {
                let bound = Bound::restored(*bound, vms)?;
                let numbered = bound.ring.records.iter().all(|record| record.submission.0 < submissions);
                Invalid::unless(numbered && bound.serial <= serial, || {
                    format!(
                        "channel {} of VM {} has a serial or submission number that was not assigned yet",
                        bound.channel.0, bound.vm
                    )
                })?;
                Ok(Self::Bound(Box::new(bound)))
            }
            SavedSlot::Stuck { vm, directory, stranded, span } => {
                Ok(Self::Stuck { vm: TenantId(vm), directory: page(directory)?, span: Span(span), stranded })
            }
        }
    }
}

impl Bound {
    pub(super) fn save(&self) -> SavedBound {
        let Self {
            vm,
            channel,
            serial,
            instance,
            directory,
            span,
            userd,
            contexts,
            // The card's block contains the pointer by the time the channel is saved or arrives on another card.
            graphics: _,
            next_contexts,
            requested,
            permit,
            told: _,
            stranded,
            still,
            ring,
        } = self;
        let addresses = |contexts: &[Option<GpuVa>; 3]| contexts.map(|context| context.map(|va| va.0));
        SavedBound {
            vm: vm.0,
            channel: channel.0,
            serial: *serial,
            instance: (*instance).into(),
            directory: directory.0,
            userd: userd.0,
            contexts: addresses(contexts),
            next_contexts: next_contexts.as_ref().map(addresses),
            enabled: *requested == RequestedState::Enabled,
            permit: match permit {
                Permit::Granted => SavedPermit::Granted,
                Permit::Withheld => SavedPermit::Withheld,
                Permit::Ended => SavedPermit::Ended,
            },
            stranded: *stranded,
            still: still.as_ref().map(Episode::save),
            ring: ring.save(),
            span: span.0,
        }
    }

    pub(super) fn restored(saved: SavedBound, vms: &BTreeMap<TenantId, Vm>) -> Result<Self, Invalid> {
        let SavedBound {
            vm,
            channel,
            serial,
            instance,
            directory,
            userd,
            contexts,
            next_contexts,
            enabled,
            permit,
            stranded,
            still,
            ring,
            span,
        } = saved;
        let vm = TenantId(vm);
        let permit = match permit {
            SavedPermit::Granted => Permit::Granted,
            SavedPermit::Withheld => Permit::Withheld,
            SavedPermit::Ended => Permit::Ended,
        };
        let paused = vms.get(&vm).is_none_or(|vm| vm.paused != 0);
        let runs = enabled && permit == Permit::Granted && !paused;
        Invalid::unless(GuestVramAddr(userd).page().0 == userd, || "a USERD address is not page-aligned".into())?;
        let next_contexts = next_contexts.map(restored_contexts).transpose()?;
        Ok(Self {
            vm,
            channel: VirtualChannelId(channel),
            serial,
            instance: instance.into(),
            directory: page(directory)?,
            span: Span(span),
            userd: GuestVramAddr(userd),
            contexts: restored_contexts(contexts)?,
            graphics: Graphics::Attached,
            next_contexts,
            requested: if enabled { RequestedState::Enabled } else { RequestedState::Stopped },
            permit,
            told: if runs { RunState::Running } else { RunState::Stopped },
            stranded,
            still: still.map(|episode| Episode::restored(&episode)).transpose()?,
            ring: Ring::restored(ring)?,
        })
    }
}

fn restored_contexts(contexts: [Option<u64>; 3]) -> Result<[Option<GpuVa>; 3], Invalid> {
    let pages = contexts.iter().flatten().all(|va| *va < 1 << VA_BITS && GpuVa(*va).page().0 == *va);
    Invalid::unless(pages, || "a context address is not page-aligned".into())?;
    Ok(contexts.map(|context| context.map(GpuVa)))
}

pub(super) fn page(address: u64) -> Result<VramAddr, Invalid> {
    let aligned = address.checked_rem(SMALL_PAGE) == Some(0);
    Invalid::unless(aligned, || format!("page directory address {address:#x} is not page-aligned"))?;
    Ok(VramAddr(address))
}

impl Vm {
    pub(super) fn save(&self, vm: TenantId) -> SavedVm {
        let Self {
            cap,
            paused,
            trusted,
            // The channels are in the slots.
            channels: _,
            list,
            unlisted,
            refused,
            saved,
            news,
            told,
            hang_limit,
            next_look,
        } = self;
        let refused = refused.iter().map(|(channel, refused)| {
            let Refused { instance, userd, told } = refused;
            (*channel, SavedRefused { instance: (*instance).into(), userd: userd.map(|userd| userd.0), told: *told })
        });
        SavedVm {
            vm: vm.0,
            cap: *cap,
            paused: *paused,
            trusted: *trusted,
            list: list.clone(),
            unlisted: unlisted.iter().map(|channel| channel.0).collect(),
            refused: refused.collect(),
            saved: saved.iter().map(|(channel, words)| (*channel, words.map(|(_, value)| value))).collect(),
            news: *news,
            told: *told,
            hang_limit: *hang_limit,
            next_look: *next_look,
        }
    }

    pub(super) fn restored(
        saved: SavedVm,
        channels: BTreeMap<u8, ChannelId>,
        slots: &[SavedSlot],
    ) -> Result<Self, Invalid> {
        let SavedVm { vm, cap, paused, trusted, list, unlisted, refused, saved, news, told, hang_limit, next_look } =
            saved;
        let id = TenantId(vm);
        let says = |what: &'static str| move || format!("VM {id}: {what}");
        Invalid::unless(channels.len() <= cap as usize, says("more channels are bound than its limit permits"))?;
        Invalid::unless(paused & !Pause::all() == 0, says("it is paused for an unknown reason"))?;
        Invalid::unless(!trusted || id.is_mediator(), says("a guest must not be trusted"))?;
        Invalid::unless(news < 1 << engine::COUNT, says("a notification is pending for an unknown engine"))?;
        let listed: BTreeSet<u8> = list.iter().copied().collect();
        let may_be_listed = |channel: &u8| {
            let slot = channels.get(channel).and_then(|physical| slots.get(usize::from(physical.0)));
            matches!(slot, Some(SavedSlot::Bound(bound)) if bound.permit != SavedPermit::Ended)
        };
        Invalid::unless(
            listed.len() == list.len() && list.iter().all(may_be_listed),
            says("its runlist contains a channel twice, or one that is not bound"),
        )?;
        let numbers = unlisted.iter().all(|channel| u32::from(*channel) < CHANNELS);
        Invalid::unless(numbers && unlisted.len() <= CHANNELS as usize, says("an unlisted channel does not exist"))?;
        let keys = |mut keys: Vec<u8>| {
            let last = keys.last().copied();
            let ordered = ascend(keys.drain(..)) && last.is_none_or(|last| u32::from(last) < CHANNELS);
            Invalid::unless(ordered, says("its unbound channels are not in order"))
        };
        keys(refused.iter().map(|(channel, _)| *channel).collect())?;
        keys(saved.iter().map(|(channel, _)| *channel).collect())?;
        let unbound = refused.iter().map(|(channel, _)| channel).chain(saved.iter().map(|(channel, _)| channel));
        Invalid::unless(
            unbound.clone().all(|channel| !channels.contains_key(channel)),
            says("a channel is recorded as both bound and unbound"),
        )?;
        let words = |[get, fetch, put]: [u32; 3]| -> SavedWords {
            [(ramfc::GP_GET, get), (ramfc::GP_FETCH, fetch), (ramfc::GP_PUT, put)]
        };
        let refused = refused.into_iter().map(|(channel, SavedRefused { instance, userd, told })| {
            (channel, Refused { instance: instance.into(), userd: userd.map(GuestVramAddr), told })
        });
        Ok(Self {
            cap,
            paused,
            trusted,
            channels,
            list,
            unlisted: unlisted.into_iter().map(ChannelId).collect(),
            refused: refused.collect(),
            saved: saved.into_iter().map(|(channel, values)| (channel, words(values))).collect(),
            news,
            told,
            hang_limit,
            next_look,
        })
    }
}

impl From<Place> for SavedPlace {
    fn from(place: Place) -> Self {
        match place {
            Place::Vram(address) => Self::Vram(address.0),
            Place::Ram(address) => Self::Ram(address.0),
        }
    }
}

impl From<SavedPlace> for Place {
    fn from(saved: SavedPlace) -> Self {
        match saved {
            SavedPlace::Vram(address) => Self::Vram(GuestVramAddr(address)),
            SavedPlace::Ram(address) => Self::Ram(Gpa(address)),
        }
    }
}

#[cfg(test)]
mod tests;
