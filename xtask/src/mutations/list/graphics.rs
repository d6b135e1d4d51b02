//! Mistakes in the code that clears PGRAPH between VMs.

use crate::mutations::Mutation;

pub(super) const MUTATIONS: &[Mutation] = &[
    Mutation {
        name: "residue-register",
        what: "a register that one VM's kernel has left is cleared for another's",
        package: "vgpu",
        file: "mediator/residue/src/scrub.sm20",
        from: "        MOV     R8, RZ\n",
        to: "",
        tests: "residue::",
    },
    Mutation {
        name: "residue-shared",
        what: "shared memory is cleared to its end",
        package: "vgpu",
        file: "mediator/residue/src/scrub.sm20",
        from: "        STS.128 [at+BYTES+BYTES], R4\n",
        to: "",
        tests: "residue::",
    },
    Mutation {
        name: "residue-number",
        what: "what a VM that has gone has left is cleared for the next of its number",
        package: "vgpu",
        file: "mediator/residue/src/tenancy.rs",
        from: "        if self.tenant == Some(tenant) {\n            self.tenant = None;",
        to: "        if self.tenant == Some(tenant) && self.phase == Phase::Leaving {\n            self.tenant = None;",
        tests: "residue::",
    },
    Mutation {
        name: "graphics-shut-out",
        what: "a channel that waits for a semaphore and is not admitted to PGRAPH looks again",
        package: "vgpu",
        file: "mediator/owner/src/host_card/scheduling.rs",
        from: "self.is_shut_out(channel) && !self.scrubber",
        to: "self.still && !self.scrubber",
        tests: "residue::channel_that_waits",
    },
    Mutation {
        name: "graphics-kept",
        what: "a VM whose work elsewhere keeps PGRAPH from others is charged for that",
        package: "vgpu",
        file: "mediator/owner/src/host_card/scrubber.rs",
        from: "        self.keeps_since = idle.then_some(now);\n",
        to: "        self.keeps_since = (idle && now.0 == 0).then_some(now);\n",
        tests: "residue::a_vm_that_copies",
    },
    Mutation {
        name: "graphics-turn",
        what: "work of a channel that closes PGRAPH to others waits for PGRAPH's turn",
        package: "vgpu",
        file: "mediator/owner/src/host_card/scheduling.rs",
        from: "        self.scrubber.is_some() && graphics\n",
        to: "        self.scrubber.is_none() && graphics\n",
        tests: "residue::a_vm_that_copies",
    },
    Mutation {
        name: "graphics-gate",
        what: "channels of a VM that is not admitted to PGRAPH are kept off the card",
        package: "channels",
        file: "channels/src/gate.rs",
        from: "        if self.is_barred(bound) {",
        to: "        if self.is_barred(bound) && bound.contexts.is_empty() {",
        tests: "gate::",
    },
];
