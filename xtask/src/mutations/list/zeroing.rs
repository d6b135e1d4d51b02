//! Mistakes about memory that is zeroed before the next one gets it.

use crate::mutations::Mutation;

pub(super) const MUTATIONS: &[Mutation] = &[
    Mutation {
        name: "zeroed-by-engines",
        what: "who needs a chunk that the engines zero gets it when they have done so",
        package: "vgpu",
        file: "mediator/memory/src/zeroing.rs",
        from: "            let set = u32::from_le_bytes(word) == count;\n",
        to: "            let set = count != 0;\n",
        tests: "zeroing::who_needs",
    },
    Mutation {
        name: "zeroed-in-vain",
        what: "what the engines have failed to zero is zeroed by the CPU",
        package: "vgpu",
        file: "mediator/owner/src/host_card/zeroing.rs",
        from: "            Ok(()) => self.lock().vram_mut().engines_have_failed(),",
        to: "            Ok(()) => self.lock().vram_mut().engines_have_zeroed(),",
        tests: "zeroing::what_engines",
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
