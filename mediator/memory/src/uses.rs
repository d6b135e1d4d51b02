//! Counts how often each chunk of a VM is used, for as long as an operator wants to know: what `mediatorctl memory profile`
//! takes over later.
//!
//! A card that counts accesses says it itself; of another one, each look at which a chunk was seen used counts as one: what
//! submissions name, and what the guest's CPU reaches by messages.

use super::Memory;
use super::balance::accesses;
use card::AccessCounts;
use vram::victim::VictimPolicy;
use vram::{Lookup, VmId};

/// Uses of a VM's chunks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Uses {
    /// The card has counted accesses; else these are looks at which a chunk was seen used.
    pub counted: bool,
    /// Looks that were taken.
    pub looks: u64,
    /// Uses of each guest chunk.
    pub chunks: Vec<u64>,
}

impl Uses {
    /// Nothing of a VM of so many chunks was used yet.
    fn none(chunks: u32) -> Self {
        Self { chunks: vec![0; chunks as usize], ..Self::default() }
    }

    fn add(&mut self, index: u64, uses: u64) {
        let chunk = usize::try_from(index).ok().and_then(|index| self.chunks.get_mut(index));
        if let Some(sum) = chunk {
            *sum = sum.saturating_add(uses);
        }
    }
}

impl Memory {
    /// Begins to count how often each chunk of a VM is used. `false` when that is being done already, or there is no such VM.
    pub fn count_uses(&mut self, now: u64, vm: VmId) -> bool {
        let Some(chunks) = self.vram.chunks.vms().find(|(of, _)| *of == vm).map(|(_, account)| account.advertised)
        else {
            return false;
        };
        if self.uses.contains_key(&vm) {
            return false;
        }
        self.uses.insert(vm, Uses::none(chunks));
        // What was used before is not in it.
        let counts = self.take_counts(now);
        self.tell_balancer(counts.as_ref());
        self.uses.insert(vm, Uses::none(chunks));
        self.watch();
        self.vram.wakeup.ring();
        true
    }

    /// Ends that, and returns how often; `None` when nobody had it counted, or the VM has gone.
    pub fn uses_counted(&mut self, now: u64, vm: VmId) -> Option<Uses> {
        if !self.uses.contains_key(&vm) {
            return None;
        }
        let counts = self.take_counts(now);
        self.tell_balancer(counts.as_ref());
        let uses = self.uses.remove(&vm);
        self.watch();
        uses
    }

    /// Has the mediator note what is used, as long as somebody wants to know.
    pub(super) fn watch(&mut self) {
        let wanted = self.divider.division().balance.policy == VictimPolicy::Clock || !self.uses.is_empty();
        self.vram.watches = wanted;
    }

    /// Adds what was used since the last look.
    pub(super) fn add_uses(&mut self, counts: Option<&AccessCounts>) {
        let Self { vram, uses, .. } = self;
        for (&vm, uses) in uses.iter_mut() {
            uses.looks = uses.looks.saturating_add(1);
            let Some(counts) = counts else {
                let touched = vram.touched.range((vm, 0)..=(vm, u64::MAX));
                touched.for_each(|&(_, index)| uses.add(index, 1));
                continue;
            };
            if !uses.counted {
                // Both are not of one unit.
                *uses = Uses { counted: true, looks: 1, chunks: vec![0; uses.chunks.len()] };
            }
            for index in 0..uses.chunks.len() as u32 {
                if let Lookup::Placed(place) = vram.chunks.lookup(vm, vram.chunks.guest_address(index), 1) {
                    uses.add(index.into(), accesses(vram, counts, place));
                }
            }
        }
    }
}
