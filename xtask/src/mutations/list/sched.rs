//! Mistakes in who has an engine next, and who pays for it.

use crate::mutations::Mutation;

pub(super) const MUTATIONS: &[Mutation] = &[
    Mutation {
        name: "alone-beside-debtor",
        what: "who has saved time keeps it while another one wants to run and owes",
        package: "sched",
        file: "sched/src/policy/credit.rs",
        from: "            used || member.active(view.now, view.config.band.wait_ns)\n",
        to: "            let _ = member;\n            used\n",
        tests: "toggled::",
    },
    Mutation {
        name: "late-twice",
        what: "time until an end is seen is charged once where the engine has gone on meanwhile",
        package: "sched",
        file: "sched/src/scheduler.rs",
        from: "running().map_or(self.now, |(_, since)| since.min(self.now));",
        to: "running().map_or(self.now, |_| self.now);",
        tests: "seen_late",
    },
    Mutation {
        name: "free-wait-forgotten",
        what: "who keeps the engine keeps the wait that is free",
        package: "sched",
        file: "sched/src/policy/band.rs",
        from: "filter(|last| last.vgpu == vgpu).map_or(0, |last| last.free);",
        to: "filter(|last| last.vgpu == vgpu).map_or(0, |_| 0_u64);",
        tests: "is_free",
    },
    Mutation {
        name: "given-for-nothing",
        what: "an engine that waits until the card has a submission is paid for",
        package: "sched",
        file: "sched/src/policy/band.rs",
        from: "            self.pay(vgpu, ns, view);\n        }\n    }\n\n    fn ended",
        to: "            self.pay(vgpu, ns.min(1), view);\n        }\n    }\n\n    fn ended",
        tests: "until_the_card_has_it",
    },
    Mutation {
        name: "melts-among-all",
        what: "VMs that do nothing take nothing from one that rests",
        package: "sched",
        file: "sched/src/policy/lag.rs",
        from: "filter(|(id, member)| competes(id, member)).map(|(_, m)| weight(m)).sum();",
        to: "filter(|(id, member)| competes(id, member) || true).map(|(_, m)| weight(m)).sum();",
        tests: "idle_vms_do_not_keep",
    },
    Mutation {
        name: "resting-earns-nothing",
        what: "a vGPU that rests has its share of a period to its credit when it comes back",
        package: "sched",
        file: "sched/src/policy/lag.rs",
        from: "let least = -of(keep);",
        to: "let least = -of(keep.min(0));",
        tests: "made_up_for",
    },
];
