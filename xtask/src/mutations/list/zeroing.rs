//! Mistakes in memory that is zeroed before its next owner gets it.

use crate::mutations::Mutation;

pub(super) const MUTATIONS: &[Mutation] = &[
    Mutation {
        name: "zeroed-by-engines",
        what: "what the engines have been given to zero is nobody's until they have done so",
        package: "vgpu",
        file: "mediator/memory/src/zeroing.rs",
        from: "            self.zeroing.engines = work.collect();\n",
        to: "            self.zeroing.engines = work.collect();\n            self.engines_have_zeroed();\n",
        tests: "zeroing::",
    },
    Mutation {
        name: "zeroed-in-vain",
        what: "what the engines have failed to zero is zeroed by the CPU",
        package: "vgpu",
        file: "mediator/card-manager/src/managed_card/zeroing.rs",
        from: "            Ok(()) => self.lock().vram_mut().engines_have_failed(),",
        to: "            Ok(()) => self.lock().vram_mut().engines_have_zeroed(),",
        tests: "zeroing::chunks_that_engines_fail_to_zero_are_zeroed_by_cpu",
    },
    Mutation {
        name: "zeroed-pages",
        what: "pages of page tables that somebody has had are zeroed again",
        package: "vram",
        file: "vram/src/pool.rs",
        from: "        zeroed == bytes\n",
        to: "        zeroed <= bytes\n",
        tests: "pool::",
    },
];
