//! The mistakes: each removes the check that its `what` names. Those of crates under `mediator/` are in [`mediator`],
//! those of the code that clears PGRAPH in [`graphics`], those of zeroed memory in [`zeroing`], those of CUDA in
//! [`cuda`] and [`cuda_bounds`], those of crates that check guests' requests in [`guests`], those of `fleet` in
//! [`fleet`], those of the Xen endpoint in [`xen`], those of saved state in [`state`], those of the scheduler in
//! [`sched`].

use super::Mutation;

mod cuda;
mod cuda_bounds;
mod fleet;
mod graphics;
mod guests;
mod hosts;
mod mediator;
mod sched;
mod state;
mod xen;
mod zeroing;

/// All mistakes.
pub(super) fn mutations() -> impl Iterator<Item = &'static Mutation> {
    MUTATIONS
        .iter()
        .chain(mediator::MUTATIONS)
        .chain(sched::MUTATIONS)
        .chain(graphics::MUTATIONS)
        .chain(zeroing::MUTATIONS)
        .chain(cuda::MUTATIONS)
        .chain(cuda_bounds::MUTATIONS)
        .chain(guests::MUTATIONS)
        .chain(fleet::MUTATIONS)
        .chain(state::MUTATIONS)
        .chain(hosts::MUTATIONS)
        .chain(xen::MUTATIONS)
}

const MUTATIONS: &[Mutation] = &[
    Mutation {
        name: "claimed-share",
        what: "what the mediator claims of free chunks is no part of VMs' shares",
        package: "vram",
        file: "vram/src/chunks/mediator.rs",
        from: "let kept = self.mediator + self.kept_for_mediator() + self.parked",
        to: "let kept = self.mediator.max(self.set_aside) + self.parked",
        tests: "balance::",
    },
    Mutation {
        name: "forgotten-vm",
        what: "nothing is known of a VM that is destroyed about who gets its number",
        package: "vram",
        file: "vram/src/balance.rs",
        from: "        self.known.remove(&vm);\n        self.active.remove(&vm);\n",
        to: "        self.active.remove(&vm);\n",
        tests: "balance::",
    },
    Mutation {
        name: "residency",
        what: "a VM keeps memory that has just come to it, whatever others request",
        package: "vram",
        file: "vram/src/balance/plan.rs",
        from: "Some((own, _)) if own != at => Stays::Resident,",
        to: "Some((own, _)) if own != at => Stays::None,",
        tests: "vm_keeps_returned_memory_for_a_while_despite_requests",
    },
    Mutation {
        name: "unmap-nothing",
        what: "a range in which nothing is mapped is unmapped without an error",
        package: "vmm-glue",
        file: "vmm-glue/src/connection/session.rs",
        from: "Ok(self.unmap_range(device, gpa, last))",
        to: "match self.unmap_range(device, gpa, last) { 0 => refuse(Errno::INVAL, \"nothing is there\"), bytes => Ok(bytes) }",
        tests: "unmapped",
    },
    Mutation {
        name: "admin-socket",
        what: "who may open a VM's socket may not open the admin socket, unless the operator says so",
        package: "config",
        file: "mediator/config/src/lib.rs",
        from: "admin_mode: SocketMode(0o600),",
        to: "admin_mode: SocketMode::default(),",
        tests: "admin_socket",
    },
    Mutation {
        name: "event-kind",
        what: "a client's interrupt descriptor is an eventfd, whatever a file is named",
        package: "vmm-glue",
        file: "vmm-glue/src/event.rs",
        from: "link.is_ok_and(|link| link.as_os_str() == \"anon_inode:[eventfd]\")",
        to: "link.is_ok_and(|link| link.to_string_lossy().contains(\"[eventfd]\"))",
        tests: "event::",
    },
    Mutation {
        name: "touched-unbounded",
        what: "no more of a client's untouched memory is touched than the operator allows",
        package: "vmm-glue",
        file: "vmm-glue/src/memory/touched.rs",
        from: ".filter(|sum| *sum <= limit)",
        to: ".filter(|sum| *sum <= limit.max(1 << 62))",
        tests: "touched",
    },
    Mutation {
        name: "event-blocks",
        what: "a client's counter is read without waiting, whatever the flags of its file are",
        package: "vmm-glue",
        file: "vmm-glue/src/event.rs",
        from: "u64::MAX, ReadWriteFlags::NOWAIT).is_ok()",
        to: "u64::MAX, ReadWriteFlags::empty()).is_err()",
        tests: "event::tests::signals_add_up",
    },
    Mutation {
        name: "kept-forgotten",
        what: "a channel that the card keeps is looked at again, so that it is given back when it has left late",
        package: "card-manager",
        file: "mediator/card-manager/src/work/departures.rs",
        from: "self.is_leaving() || self.stage == Stage::Kept && now_ns >= self.looked_ns.saturating_add(KEPT_LOOK_NS)",
        to: "let _ = now_ns; self.is_leaving()",
        tests: "departures::tests",
    },
    Mutation {
        name: "left-in-between",
        what: "a channel that has left while its VM takes it off the card is given back",
        package: "vgpu",
        file: "mediator/vgpu/src/backend/channels.rs",
        from: "                state.channels_mut().strand(self.vm, channel);\n                let _ = state.end_channel(self.vm, channel);\n            }\n            retired",
        to: "                drop(state);\n                std::thread::yield_now();\n                self.host.lock().channels_mut().strand(self.vm, channel);\n                let _ = self.host.lock().end_channel(self.vm, channel);\n            }\n            retired",
        tests: "failing::a_channel_that_has_left",
    },
    Mutation {
        name: "engine-busy",
        what: "on the software card as well, work that has begun keeps its engine until its time has passed",
        package: "simgpu",
        file: "simgpu/src/fifo.rs",
        from: "holds(slot) && slot.works(now) && slot.condition",
        to: "holds(slot) && slot.pending() && slot.condition",
        tests: "tests::timing::removed_channel_keeps_engine_until_its_work_time_passes",
    },
    Mutation {
        name: "vfio-reserved",
        what: "an I/O address that the host's IOMMU keeps is not mapped for a card behind VFIO",
        package: "vfio-card",
        file: "vfio/src/dma.rs",
        from: "range.start <= iova && end <= range.end",
        to: "range.start <= iova || end <= range.end",
        tests: "tests::card::memory_is_mapped",
    },
    Mutation {
        name: "vfio-memory-kept",
        what: "mappings are withdrawn before the memory behind them goes",
        package: "vfio-card",
        file: "vfio/src/lib.rs",
        from: "self.mappings.unmap_all(&*self.kernel);",
        to: "",
        tests: "tests::card::memory_is_mapped",
    },
    Mutation {
        name: "vfio-posted",
        what: "a card that its VBIOS has not initialised is refused",
        package: "vfio-card",
        file: "vfio/src/open.rs",
        from: "if !ptop::DEVINIT_STATUS::DONE.is_set(value) {",
        to: "if false {",
        tests: "tests::open::each_open_obstacle_is_reported_with_a_fix",
    },
    Mutation {
        name: "quarantine-owned",
        what: "a chunk that is quarantined goes to nobody when its owner loses it",
        package: "vram",
        file: "vram/src/chunks/stock.rs",
        from: "_ => drop(self.condemned.insert(number)),",
        to: "_ => {}",
        tests: "places::",
    },
    Mutation {
        name: "no-post",
        what: "a card whose VBIOS has not run is refused with what to do",
        package: "vgpu",
        file: "mediator/bringup/src/start.rs",
        from: "if !ptop::DEVINIT_STATUS::DONE.is_set(value) {",
        to: "if value == u32::MAX {",
        tests: "card_without_post",
    },
    Mutation {
        name: "scrub",
        what: "a freed chunk is zeroed before it is given away",
        package: "vram",
        file: "vram/src/chunks/stock.rs",
        from: "self.go(number, ChunkState::NeedsScrub);\n        self.to_scrub.push_back(number);",
        to: "self.states[number as usize] = ChunkState::Free;\n        self.free.insert(number);",
        tests: "",
    },
    Mutation {
        name: "gone-move",
        what: "what a copy was made to is zeroed before it is given away, if the chunk has gone meanwhile",
        package: "vram",
        file: "vram/src/chunks/moves.rs",
        from: "        self.abandon(flight.to);\n",
        to: "        self.abandon(flight.to);\n        while let Some(work) = self.take_scrub_work() {\n            self.scrubbed(work.place);\n        }\n",
        tests: "",
    },
    Mutation {
        name: "vram-end",
        what: "a VM reaches no byte behind the end of its VRAM",
        package: "vram",
        file: "vram/src/chunks/lookup.rs",
        from: "if end > map.bytes()",
        to: "if end > map.bytes() + self.chunk_bytes()",
        tests: "",
    },
    Mutation {
        name: "sched-charge",
        what: "a submission is charged from the end of the one before it on",
        package: "sched",
        file: "sched/src/flight.rs",
        from: "let used = ended.since(flight.started.max(self.last_end));",
        to: "let used = ended.since(flight.started);",
        tests: "tests::properties::tickets",
    },
    Mutation {
        name: "sched-limit",
        what: "a submission beyond its limit is killed",
        package: "sched",
        file: "sched/src/scheduler.rs",
        from: "if self.deadline(state).is_none_or(|deadline| self.now < deadline) {",
        to: "if self.deadline(state).is_none_or(|_| true) {",
        tests: "tests::limits::a_submission",
    },
    Mutation {
        name: "sched-cap",
        what: "what is used counts against a cap",
        package: "sched",
        file: "sched/src/lane.rs",
        from: "/ 8);\n        member.bucket.fill(member.params.cap_permille, now);\n        member.bucket.take(used);",
        to: "/ 8);",
        tests: "tests::limits::a_cap",
    },
    Mutation {
        name: "sched-stamp",
        what: "a forged end is not believed beyond the slack",
        package: "sched",
        file: "sched/src/scheduler.rs",
        from: ".clamp(earliest, self.now)",
        to: ".clamp(earliest.min(Nanos(0)), self.now)",
        tests: "tests::machine::completion_seen_late_costs_only_engine_idle_time tests::machine::too_early_completion_time_is_clamped_to_slack",
    },
    Mutation {
        name: "sched-wait",
        what: "the engine's waiting is paid for by the vGPU that it waits for",
        package: "sched",
        file: "sched/src/policy/band.rs",
        from: "self.pay(payer, gap.saturating_sub(free), view);",
        to: "self.pay(payer, gap.saturating_sub(gap.max(free)), view);",
        tests: "sim::tests::vm_idling_around_engine_wait_takes_no_neighbour_share",
    },
    Mutation {
        name: "sched-late",
        what: "time between a claimed end and its being seen is paid for",
        package: "sched",
        file: "sched/src/policy/band.rs",
        from: "self.pay(vgpu, late.saturating_sub(free), view);",
        to: "self.pay(vgpu, late.saturating_sub(late.max(free)), view);",
        tests: "sim::tests::ends_that_are_forged",
    },
    Mutation {
        name: "sched-overrun",
        what: "what a vGPU has had beyond its share is not forgotten",
        package: "sched",
        file: "sched/src/policy/lag.rs",
        from: "self.change(vgpu, |beyond| beyond.saturating_add(used_signed).saturating_sub(rest));",
        to: "self.change(vgpu, |beyond| beyond.saturating_add(used_signed).saturating_sub(rest).min(0));",
        tests: "sim::tests::band_meets",
    },
    Mutation {
        name: "sched-policy-change",
        what: "what is queued survives a change of policy",
        package: "sched",
        file: "sched/src/scheduler.rs",
        from: "self.lanes[lane].adopt(*vgpu, queued);",
        to: "let _ = (lane, queued);",
        tests: "tests::properties::tickets",
    },
    Mutation {
        name: "sched-budget",
        what: "a debt in BAND's budgets is forgiven beyond some periods",
        package: "sched",
        file: "sched/src/policy/credit.rs",
        from: ".min(of.most).max(-deepest);",
        to: ".min(of.most);",
        tests: "tests::competing::a_debt",
    },
    Mutation {
        name: "sched-competing",
        what: "budgets are not divided among vGPUs that do nothing",
        package: "sched",
        file: "sched/src/policy/credit.rs",
        from: "if !wants && used == 0 {",
        to: "if member.held && used == 0 {",
        tests: "tests::competing::shares_are",
    },
    Mutation {
        name: "sched-saved",
        what: "who saves up budgets makes no one else be overdrawn for good",
        package: "sched",
        file: "sched/src/policy/credit.rs",
        from: "if spare > 0 && of.left > share {",
        to: "if spare < 0 && of.left > share {",
        tests: "tests::competing::no_one_gains",
    },
    Mutation {
        name: "sched-quarantine",
        what: "nothing starts of a vGPU in quarantine",
        package: "sched",
        file: "sched/src/lane.rs",
        from: "&& !self.held",
        to: "",
        tests: "tests::limits::the_last",
    },
    Mutation {
        name: "sched-limit-put-off",
        what: "ends of other work do not put a limit off",
        package: "sched",
        file: "sched/src/flight.rs",
        from: "first.began.unwrap_or(first.started.max(self.last_end))",
        to: "first.started.max(self.last_end)",
        tests: "tests::limits::short_work",
    },
    Mutation {
        name: "sched-moved",
        what: "what works between its waits is charged",
        package: "sched",
        file: "sched/src/flight.rs",
        from: "let used = now.since(since.max(self.last_end));",
        to: "let used = now.since(since.max(self.last_end).max(now));",
        tests: "tests::limits::waiting_submission_progress_between_polls_is_charged",
    },
    Mutation {
        name: "mediator-claim",
        what: "what the mediator claims is no VM's",
        package: "vram",
        file: "vram/src/chunks.rs",
        from: "self.uncommitted().saturating_sub(self.wanted())",
        to: "self.uncommitted()",
        tests: "chunks::",
    },
    Mutation {
        name: "reserve-borrow",
        what: "the mediator borrows no more than is left of the reserve",
        package: "vram",
        file: "vram/src/chunks/mediator.rs",
        from: "if borrowed > self.left_reserve() {",
        to: "if borrowed > self.left_reserve() + 1 {",
        tests: "chunks::",
    },
    Mutation {
        name: "frozen-vm",
        what: "chunks of a VM that nobody is told of stay where they are",
        package: "vram",
        file: "vram/src/chunks/moves.rs",
        from: "if self.is_frozen(vm) {",
        to: "if false && self.is_frozen(vm) {",
        tests: "chunks::",
    },
    Mutation {
        name: "window-write-first",
        what: "without memory for the window's part of a write nothing of it is done",
        package: "devmodel",
        file: "devmodel/src/vgpu.rs",
        from: "self.pramin_write(offset, inside, backend)?;",
        to: "let _lost = self.pramin_write(offset, inside, backend);",
        tests: "memory::",
    },
];
