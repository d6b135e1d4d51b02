//! Computes plans. A plan is a list of chunks to move now.

use super::share::{Claim, Shares};
use super::{Balancer, By, Request};
use crate::{ChunkTable, Limits, Step, TenantId, Tier, To};

/// State of a VM during planning. Moves in flight and planned steps count as completed.
#[derive(Debug)]
struct Vm {
    id: TenantId,
    limits: Limits,
    guarantee: u32,
    /// Number of placed chunks.
    all: u32,
    /// Number of these chunks that are counted as card chunks.
    card: u32,
    /// Number of card chunks missing from the guarantee.
    owed: u32,
    /// Number of chunks that can still be evicted to host memory.
    swap_room: u32,
    /// Number of chunks in host memory or the reserve that are not moving.
    back_room: u32,
    /// True if no more chunks of the VM can be evicted.
    exhausted: bool,
}

/// Recently moved chunks that must not be evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stays {
    /// No chunks.
    None,
    /// Chunks of a VM with work that have been on the card for less than
    /// [`Config::residency_ns`](super::Config::residency_ns).
    Resident,
    /// Chunks that have not [settled](super::Config::settle_ns) yet.
    Unsettled,
}

/// A plan under construction.
#[derive(Debug)]
pub(super) struct Round<'a> {
    table: &'a ChunkTable,
    vms: Vec<Vm>,
    /// Number of spare chunks, including chunks that moves in flight and planned evictions will free.
    spare: u32,
    /// Number of chunks of all VMs that can still be evicted to host memory.
    host_room: u32,
    /// Number of these chunks that fit in the reserve.
    reserve: u32,
    steps: Vec<Step>,
    steps_max: usize,
}

impl<'a> Round<'a> {
    pub(super) fn new(table: &'a ChunkTable, steps_max: usize) -> Self {
        let mut vms: Vec<Vm> = table
            .vms()
            .map(|(id, account)| {
                let swapped = account.host + account.parked;
                let moves = !table.is_frozen(id);
                Vm {
                    id,
                    limits: account.limits,
                    guarantee: account.guarantee,
                    all: account.placed + swapped,
                    card: account.placed,
                    owed: 0,
                    swap_room: if moves { account.limits.swap_cap.saturating_sub(swapped) } else { 0 },
                    back_room: if moves { swapped } else { 0 },
                    exhausted: false,
                }
            })
            .collect();
        let mut spare = table.spare();
        for flight in table.moves().filter(|flight| !table.is_gone(flight.id)) {
            let Ok(at) = vms.binary_search_by_key(&flight.vm, |vm| vm.id) else { continue };
            let vm = &mut vms[at];
            match (flight.to.card(), table.is_parked(flight.vm, flight.index)) {
                (Some(_), _) => (vm.card, vm.back_room) = (vm.card + 1, vm.back_room.saturating_sub(1)),
                (None, true) => vm.back_room = vm.back_room.saturating_sub(1),
                (None, false) => {
                    (vm.card, vm.swap_room) = (vm.card - 1, vm.swap_room.saturating_sub(1));
                    // If the move takes the VM below its guarantee, the freed chunk stays reserved for the VM.
                    spare += u32::from(vm.card >= vm.guarantee);
                }
            }
        }
        for vm in &mut vms {
            vm.owed = vm.guarantee.saturating_sub(vm.card);
        }
        let (host_room, reserve) = (table.host_room(), table.left_reserve());
        Self { table, vms, spare, host_room, reserve, steps: Vec::new(), steps_max }
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = TenantId> + '_ {
        self.vms.iter().map(|vm| vm.id)
    }

    fn steps_left(&self) -> u32 {
        u32::try_from(self.steps_max - self.steps.len()).unwrap_or(u32::MAX)
    }

    /// Returns true if another chunk of the VM can be evicted in addition to `planned` chunks.
    fn can_give(&self, at: usize, planned: u32) -> bool {
        let vm = &self.vms[at];
        !vm.exhausted && vm.swap_room > planned && vm.card > planned
    }
}

/// An exchange: one chunk of the first VM is evicted, and one chunk of the second VM is returned. Each VM is identified
/// by its index in the round.
type Exchange = (usize, usize);

impl Balancer {
    /// Returns the steps that are due now: evictions of chunks that exceed a quota, and the steps for the request.
    /// Without a request, adds the steps for fairness once per interval. Returns at most
    /// [`Config::steps_max`](super::Config::steps_max) steps, in execution order, because a step may need a chunk that
    /// an earlier step frees.
    ///
    /// The caller must execute the steps before it serves the request. If a VM still gets no card chunk, it is not
    /// entitled to another one.
    pub fn plan(&mut self, table: &ChunkTable, now_ns: u64, request: Option<Request>) -> Vec<Step> {
        self.forget(table, now_ns);
        let mut round = Round::new(table, self.config.steps_max);
        for at in 0..round.vms.len() {
            let vm = &round.vms[at];
            let beyond = vm.card.saturating_sub(vm.limits.quota);
            if beyond > 0 {
                self.evict(&mut round, at, beyond, Stays::None, now_ns);
            }
        }
        match request {
            Some(request) => self.serve(&mut round, request, now_ns),
            None if now_ns >= self.due_ns => {
                self.due_ns = now_ns.saturating_add(self.config.return_interval_ns);
                self.even_out(&mut round, now_ns);
                if round.steps.is_empty() {
                    self.drain(&mut round, now_ns);
                }
            }
            None => {}
        }
        round.steps
    }

    /// Returns each VM's share of `chunks` if `request` is granted.
    pub(super) fn shares(
        &self,
        round: &Round<'_>,
        chunks: u32,
        request: Option<(TenantId, u32)>,
        now_ns: u64,
    ) -> Shares {
        self.shares_of(round, chunks, request, |vm| self.is_idle(vm, now_ns))
    }

    /// Returns each VM's share of `chunks` if `request` is granted. Idle VMs share the remainder.
    pub(super) fn shares_of(
        &self,
        round: &Round<'_>,
        chunks: u32,
        request: Option<(TenantId, u32)>,
        is_idle: impl Fn(TenantId) -> bool,
    ) -> Shares {
        let claim = |vm: &Vm| {
            let wanted = request.filter(|(by, _)| *by == vm.id).map_or(0, |(_, wanted)| wanted);
            let most = vm.all.saturating_add(wanted).min(vm.limits.quota);
            let first = !is_idle(vm.id);
            Claim { weight: vm.limits.weight, least: vm.guarantee, most: most.max(vm.guarantee), first }
        };
        Shares::divide(chunks, &round.vms.iter().map(claim).collect::<Vec<_>>())
    }

    /// Frees chunks for a request.
    fn serve(&mut self, round: &mut Round<'_>, request: Request, now_ns: u64) {
        let table = round.table;
        // `need` is the number of chunks that must become spare for the request. For a VM's request, `requester`
        // contains the VM's index and the number of requested chunks within its quota.
        let (need, requester) = match request.by {
            By::Vm(vm) => {
                let Ok(at) = round.vms.binary_search_by_key(&vm, |vm| vm.id) else { return };
                self.active.insert(vm, now_ns);
                let vm = &round.vms[at];
                // The VM gets no chunks beyond its quota. Missing guaranteed chunks are already set aside for it.
                let gets = request.chunks.min(vm.limits.quota.saturating_sub(vm.card));
                (gets.saturating_sub(vm.owed), Some((at, gets)))
            }
            By::Mediator => (request.chunks.saturating_sub(table.for_mediator() - table.spare()), None),
            By::Guarantee => (request.chunks, None),
        };
        // Chunks for the mediator or for a guarantee are not divided among VMs.
        let taken = if requester.is_none() { need } else { 0 };
        let wanted = requester.map(|(at, gets)| (round.vms[at].id, gets));
        let shares = self.shares(round, table.for_vms().saturating_sub(taken), wanted, now_ns);
        // The loop terminates because each iteration except for the last one exhausts a VM or the step limit.
        loop {
            let missing = need.saturating_sub(round.spare);
            let mut short = false;
            for (at, count) in (0..).zip(tally(round, &shares, requester, missing)) {
                let stays = match requester {
                    Some((own, _)) if own != at => Stays::Resident,
                    _ => Stays::None,
                };
                short |= count > 0 && self.evict(round, at, count, stays, now_ns) < count;
            }
            if !short {
                return;
            }
        }
    }

    /// Plans the eviction of `count` chunks of a VM, and returns the number of planned evictions.
    fn evict(&mut self, round: &mut Round<'_>, at: usize, count: u32, stays: Stays, now_ns: u64) -> u32 {
        let count = count.min(round.vms[at].swap_room).min(round.host_room).min(round.steps_left());
        let chosen = self.victims(round, at, count, stays, now_ns);
        round.vms[at].exhausted |= (chosen.len() as u32) < count;
        for &index in &chosen {
            let to = if round.reserve > 0 { To::Reserve } else { To::Host };
            round.reserve = round.reserve.saturating_sub(1);
            self.give(round, at, index, to, now_ns);
        }
        chosen.len() as u32
    }

    /// Selects victims among a VM's chunks, excluding pinned chunks, chunks in the plan, and chunks that `stays`
    /// protects.
    fn victims(&mut self, round: &Round<'_>, at: usize, count: u32, stays: Stays, now_ns: u64) -> Vec<u32> {
        if count == 0 {
            return Vec::new();
        }
        let vm = round.vms[at].id;
        let mut blocked: Vec<u32> = round.steps.iter().filter(|step| step.vm == vm).map(|step| step.index).collect();
        let time = match stays {
            Stays::Resident if !self.is_idle(vm, now_ns) => self.config.residency_ns,
            Stays::Resident | Stays::None => 0,
            Stays::Unsettled => self.config.settle_ns,
        };
        blocked.extend(self.came(vm, Tier::Card, time, now_ns));
        let table = round.table;
        blocked.extend(&self.known(table, vm).pins);
        let mut chosen = without(table.resting(vm, Tier::Card), blocked);
        let Self { policy, known, .. } = self;
        if let Some(known) = known.get_mut(&vm) {
            policy.victims(&mut known.hints, &mut chosen, count as usize);
        }
        chosen
    }

    /// Selects at most `count` chunks of a VM to move back to the card: pinned chunks first, then chunks in the reserve
    /// (which need no copy), then others.
    fn returns(&mut self, round: &Round<'_>, at: usize, count: u32, now_ns: u64) -> Vec<u32> {
        if count == 0 {
            return Vec::new();
        }
        let (table, vm, count) = (round.table, round.vms[at].id, count as usize);
        let blocked = self.came(vm, Tier::Host, self.config.settle_ns, now_ns).collect();
        let all = without(table.resting(vm, Tier::Host), blocked);
        let pins = self.known(table, vm).pins.iter().copied();
        let mut chosen: Vec<u32> = pins.filter(|index| all.binary_search(index).is_ok()).take(count).collect();
        let parked = table.parked_of(vm).filter(|index| all.binary_search(index).is_ok() && !chosen.contains(index));
        chosen.extend(parked.take(count - chosen.len()).collect::<Vec<_>>());
        let mut others = without(all.into_iter(), chosen.clone());
        let left = count - chosen.len();
        let Self { policy, known, .. } = self;
        if let Some(known) = known.get_mut(&vm) {
            policy.returns(&mut known.hints, &mut others, left);
        }
        chosen.extend(others);
        chosen
    }

    /// Returns the chunks of a VM with a move to `tier` that was planned less than `time` ns ago, in ascending order.
    fn came(&self, vm: TenantId, tier: Tier, time: u64, now_ns: u64) -> impl Iterator<Item = u32> + '_ {
        let of_vm = self.moved.range((vm, 0)..=(vm, u32::MAX));
        let is_recent = move |when: u64| now_ns.saturating_sub(when) < time;
        of_vm
            .filter(move |&(_, &(when, to))| is_recent(when) && (to == To::Card) == (tier == Tier::Card))
            .map(|(&(_, index), _)| index)
    }

    fn give(&mut self, round: &mut Round<'_>, at: usize, index: u32, to: To, now_ns: u64) {
        let vm = &mut round.vms[at];
        (vm.card, vm.swap_room) = (vm.card - 1, vm.swap_room - 1);
        (round.host_room, round.spare) = (round.host_room - 1, round.spare + 1);
        let id = vm.id;
        self.step(round, id, index, to, now_ns);
    }

    fn step(&mut self, round: &mut Round<'_>, vm: TenantId, index: u32, to: To, now_ns: u64) {
        self.moved.insert((vm, index), (now_ns, to));
        if to == To::Card {
            self.known(round.table, vm).hints.arrived(index..=index);
        }
        round.steps.push(Step { vm, index, to });
    }

    /// Plans moves of chunks from the reserve to host memory.
    fn drain(&mut self, round: &mut Round<'_>, now_ns: u64) {
        let table = round.table;
        let waiting = table.parked().filter(|&(vm, index)| !table.is_moving(vm, index) && !table.is_frozen(vm));
        for (vm, index) in waiting.take(table.drainable().min(round.steps_left()) as usize) {
            self.step(round, vm, index, To::Host, now_ns);
        }
    }

    /// Plans returns to spare card chunks, and exchanges between VMs above and VMs below their entitlement.
    fn even_out(&mut self, round: &mut Round<'_>, now_ns: u64) {
        if round.vms.iter().all(|vm| vm.back_room == 0) {
            return;
        }
        // Chunks that will be freed by moves in flight are not available yet.
        let spare = round.table.spare().min(round.spare);
        let kept = spare.min(self.config.low_water);
        let shares = self.shares(round, round.table.for_vms() - kept, None, now_ns);
        let (free, exchanges) = settle_up(round, &shares, spare - kept);
        // Select the chunks to return and to evict first, because an exchange needs one of each.
        let mut getting: Vec<u32> = free.clone();
        let mut giving: Vec<u32> = vec![0; round.vms.len()];
        for &(from, to) in &exchanges {
            giving[from] += 1;
            getting[to] += 1;
        }
        let mut back: Vec<_> =
            (0..getting.len()).map(|at| self.returns(round, at, getting[at], now_ns).into_iter()).collect();
        let mut out: Vec<_> = (0..giving.len())
            .map(|at| self.victims(round, at, giving[at], Stays::Unsettled, now_ns).into_iter())
            .collect();
        for (at, &count) in free.iter().enumerate() {
            for index in back[at].by_ref().take(count as usize) {
                self.step(round, round.vms[at].id, index, To::Card, now_ns);
            }
        }
        let pair = |(from, to): Exchange| {
            let both = back[to].len() > 0 && out[from].len() > 0;
            both.then(|| Some(((from, out[from].next()?), (to, back[to].next()?)))).flatten()
        };
        let mut pairs: Vec<_> = exchanges.into_iter().filter_map(pair).collect();
        // During a quantum, its members wait in any case, and all moves complete earlier if all evictions precede all
        // returns. Outside a quantum, exchange one pair of chunks at a time, so that VMs are blocked only briefly.
        let together = if self.turn.is_some() { pairs.len() } else { 1 };
        if self.turn.is_some() {
            pairs.sort_by_key(|&((from, _), _)| from);
        }
        for pairs in pairs.chunks(together.max(1)) {
            for &((from, index), _) in pairs {
                self.give(round, from, index, To::Host, now_ns);
            }
            for &(_, (to, index)) in pairs {
                self.step(round, round.vms[to].id, index, To::Card, now_ns);
            }
        }
    }
}

/// Returns the number of chunks to evict from each VM to free `need` more chunks, within the step limit of the round.
/// Repeatedly selects the VM that exceeds its share the most, counting the chunks requested by `requester` as used. If
/// this VM is the requester itself, the requester gets fewer chunks instead.
fn tally(round: &Round<'_>, shares: &Shares, requester: Option<(usize, u32)>, need: u32) -> Vec<u32> {
    let mut counts = vec![0; round.vms.len()];
    let (mut need, mut wanted) = (need, requester.map_or(0, |(_, wanted)| wanted));
    let mut room = round.host_room.min(round.steps_left());
    while need > 0 && room > 0 {
        let excess = |at: usize| shares.excess(at, round.vms[at].card - counts[at]);
        let others = (0..counts.len()).filter(|&at| requester.is_none_or(|(own, _)| own != at));
        let givers = others.filter(|&at| excess(at) > 0 && round.can_give(at, counts[at]));
        // Among equal VMs, use the first one.
        let Some(giver) = givers.rev().max_by_key(|&at| excess(at)) else { break };
        let own = requester.map(|(at, _)| shares.excess(at, round.vms[at].card.saturating_add(wanted)));
        if let Some(beyond) = own.map(|own| own - excess(giver)).filter(|&beyond| beyond >= 0) {
            // In one step, deny the requester enough chunks that its excess falls below that of `giver`.
            let without = shares.chunks(beyond).saturating_add(1).min(need);
            (need, wanted) = (need - without, wanted - without);
        } else {
            counts[giver] += 1;
            (need, room) = (need - 1, room - 1);
        }
    }
    counts
}

/// Returns the number of chunks that each VM gets back (chunks owed to it, and some of the `free` chunks), and the
/// exchanges to execute after that.
fn settle_up(round: &Round<'_>, shares: &Shares, free: u32) -> (Vec<u32>, Vec<Exchange>) {
    let count = round.vms.len();
    let (mut steps, mut free, mut room) = (round.steps_left(), free, round.host_room);
    let (mut back, mut given) = (vec![0; count], vec![0; count]);
    for (vm, back) in round.vms.iter().zip(&mut back) {
        *back = vm.owed.min(vm.back_room).min(steps);
        steps -= *back;
    }
    let mut got = back.clone();
    let mut exchanges = Vec::new();
    while steps > 0 {
        let card = |at: usize| round.vms[at].card + got[at] - given[at];
        let poorest = |is_poor: &dyn Fn(usize) -> bool| {
            let poor = (0..count).filter(|&at| round.vms[at].back_room > got[at] && is_poor(at));
            // Among equal VMs, use the first one.
            poor.rev().max_by(|&a, &b| shares.lack(a, card(a)).total_cmp(&shares.lack(b, card(b))))
        };
        let is_below = |at: usize| shares.excess(at, card(at)) < 0;
        if free > 0 {
            let Some(poorest) = poorest(&is_below) else { break };
            back[poorest] += 1;
            got[poorest] += 1;
            (free, steps) = (free - 1, steps - 1);
            continue;
        }
        // Do not evict chunks of a VM that gains chunks in this round, because the VM would only exchange its own
        // chunks before they have settled.
        let is_giver = |at: usize| got[at] == 0 && shares.excess(at, card(at)) > 0 && round.can_give(at, given[at]);
        let givers = (0..count).filter(|&at| is_giver(at));
        let Some(giver) = givers.rev().max_by_key(|&at| shares.excess(at, card(at))) else { break };
        // Exchange chunks only if at least one of the two VMs is a chunk or more away from its share, and neither VM
        // crosses its share.
        let is_rich = card(giver) > shares.ceil(giver);
        let is_due = |at: usize| given[at] == 0 && if is_rich { is_below(at) } else { card(at) < shares.floor(at) };
        let Some(getter) = poorest(&is_due).filter(|_| steps > 1 && room > 0) else { break };
        got[getter] += 1;
        given[giver] += 1;
        (room, steps) = (room - 1, steps - 2);
        exchanges.push((giver, getter));
    }
    (back, exchanges)
}

/// Returns the `candidates` that are not `blocked`, in ascending order.
fn without(candidates: impl Iterator<Item = u32>, mut blocked: Vec<u32>) -> Vec<u32> {
    if blocked.is_empty() {
        return candidates.collect();
    }
    blocked.sort_unstable();
    let mut blocked = blocked.into_iter().peekable();
    let is_free = |&index: &u32| {
        while blocked.next_if(|&at| at < index).is_some() {}
        blocked.peek() != Some(&index)
    };
    candidates.filter(is_free).collect()
}
