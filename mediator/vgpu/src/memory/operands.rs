//! Memory to which submitted work refers. The `clock` policy of [`vram::victim`] uses it to select victims for
//! eviction, and `card_manager::balance` uses it to estimate bus traffic.
//!
//! A push buffer contains the sources and destinations of copies, and the addresses of code, constants, local memory
//! and semaphores. It does not show the memory that a kernel accesses through pointers in its constants.
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::arithmetic_side_effects, clippy::cast_possible_truncation)
)]

use nvspec::addr::{GpuVa, VA_BITS};
use nvspec::class::{ce90b5, compute90c0, id, m2mf9039};
use nvspec::fifo::{HeaderOp, MethodHeader, OldMethodHeader, host_method, sub_op};
use std::collections::BTreeMap;

/// Maximum number of words to read from a submission's push buffers. Addresses in later words are ignored.
const WORDS: usize = 4096;
/// Maximum number of addresses to look up per submission, so that a guest cannot delay others by repeating addresses.
const MAX_LOOKUPS: usize = 2048;
/// Maximum number of bytes counted per surface, so that an invalid surface size does not cause a long loop.
const SURFACE_MAX: u64 = 1 << 30;
/// Mask of the valid bits of a GPU virtual address.
const VA_MASK: u64 = (1 << VA_BITS) - 1;

/// Classes bound to a channel's subchannels. Initially, these are the classes that nouveau and Mesa bind, because the
/// channel may have bound its classes before the first read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Objects([u32; 8]);

impl Default for Objects {
    fn default() -> Self {
        Self([0, id::FERMI_COMPUTE_A, id::FERMI_MEMORY_TO_MEMORY_FORMAT_A, 0, id::FERMI_DMA, 0, 0, 0])
    }
}

/// Extracts the addresses in a submission while it is pulled.
#[derive(Debug)]
pub(crate) struct Names<'a> {
    objects: &'a mut Objects,
    /// Number of words that may still be read.
    words: usize,
    /// Number of addresses that may still be looked up.
    lookups: usize,
}

impl<'a> Names<'a> {
    /// Creates the extractor for a submission on a channel with these bindings.
    pub(crate) fn new(objects: &'a mut Objects) -> Self {
        Self { objects, words: WORDS, lookups: MAX_LOOKUPS }
    }

    /// Returns the number of words to read from a push buffer with `dwords` words.
    pub(crate) fn words(&mut self, dwords: u32) -> usize {
        let count = self.words.min(dwords as usize);
        self.words = self.words.saturating_sub(count);
        count
    }

    /// Calls `each` with one address for every `step` bytes of memory to which a push buffer refers, and the number of
    /// bytes.
    pub(crate) fn each(&mut self, bytes: &[u8], step: u64, mut each: impl FnMut(GpuVa, u64)) {
        let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u32::from(*byte));
        let words: Vec<u32> = bytes.chunks_exact(4).map(word).collect();
        let lookups = &mut self.lookups;
        walk(&words, self.objects, |va, len| {
            // An address may be unaligned relative to chunks, so the last byte may be in another chunk.
            let end = va.0.saturating_add(len);
            let step_by = usize::try_from(step).unwrap_or(usize::MAX).max(1);
            for at in (va.0..end).step_by(step_by).chain([end.saturating_sub(1)]).take(*lookups) {
                *lookups = lookups.saturating_sub(1);
                each(GpuVa(at), step.min(end.saturating_sub(at)));
            }
        });
    }
}

/// The two methods that set an address: bits 39:32, and bits 31:0.
type Address = (u32, u32);

/// Methods that describe a copy.
struct Copy {
    /// Method that starts the copy.
    exec: u32,
    /// Methods that set the addresses of both sides. The third method of each side sets the line pitch in bytes.
    sides: [(Address, u32); 2],
    /// Method that sets the line length in bytes.
    line: u32,
    /// Method that sets the number of lines.
    lines: u32,
}

/// Methods of a class that refer to memory.
struct Class {
    numbers: &'static [u32],
    copy: Option<Copy>,
    /// Methods that set an address without a length. The address takes effect when its low part is written.
    points: &'static [Address],
}

const CLASSES: [Class; 3] = [
    Class {
        numbers: &[id::FERMI_DMA, id::FERMI_DECOMPRESS],
        copy: Some(Copy {
            exec: ce90b5::EXEC,
            sides: [
                ((ce90b5::SRC_ADDRESS_HIGH, ce90b5::SRC_ADDRESS_LOW), ce90b5::SRC_PITCH),
                ((ce90b5::DST_ADDRESS_HIGH, ce90b5::DST_ADDRESS_LOW), ce90b5::DST_PITCH),
            ],
            line: ce90b5::X_COUNT,
            lines: ce90b5::Y_COUNT,
        }),
        points: &[(ce90b5::QUERY_ADDRESS_HIGH, ce90b5::QUERY_ADDRESS_LOW)],
    },
    Class {
        numbers: &[id::FERMI_MEMORY_TO_MEMORY_FORMAT_A],
        copy: Some(Copy {
            exec: m2mf9039::EXEC,
            sides: [
                ((m2mf9039::OFFSET_IN_HIGH, m2mf9039::OFFSET_IN_LOW), m2mf9039::PITCH_IN),
                ((m2mf9039::OFFSET_OUT_HIGH, m2mf9039::OFFSET_OUT_LOW), m2mf9039::PITCH_OUT),
            ],
            line: m2mf9039::LINE_LENGTH_IN,
            lines: m2mf9039::LINE_COUNT,
        }),
        points: &[(m2mf9039::NOTIFY_ADDRESS_HIGH, m2mf9039::NOTIFY_ADDRESS_LOW)],
    },
    Class {
        numbers: &[id::FERMI_COMPUTE_A],
        copy: None,
        points: &[
            (compute90c0::CODE_ADDRESS_HIGH, compute90c0::CODE_ADDRESS_LOW),
            (compute90c0::LOCAL_ADDRESS_HIGH, compute90c0::LOCAL_ADDRESS_LOW),
            (compute90c0::SEMAPHORE_ADDRESS_HIGH, compute90c0::SEMAPHORE_ADDRESS_LOW),
            (compute90c0::CONSTANT_ADDRESS_HIGH, compute90c0::CONSTANT_ADDRESS_LOW),
        ],
    },
];

/// State of a pass through a push buffer.
struct Walk<'a, F> {
    objects: &'a mut Objects,
    /// Last data word of each method, by subchannel.
    data: BTreeMap<(u8, u32), u32>,
    each: F,
}

/// Calls `each` with the start and size in bytes of each range to which `words` refers, or with a size of 1 if `words`
/// sets only an address. `words` starts with a header.
fn walk(words: &[u32], objects: &mut Objects, each: impl FnMut(GpuVa, u64)) {
    let mut walk = Walk { objects, data: BTreeMap::new(), each };
    let mut words = words.iter().copied();
    while let Some(word) = words.next() {
        let (header, old) = (MethodHeader::from(word), OldMethodHeader::from(word));
        let (subchannel, first, count) = match header.op() {
            HeaderOp::OldIncreasing | HeaderOp::OldNonIncreasing if old.sub_op() == sub_op::METHODS => {
                (old.subchannel(), old.method(), old.count())
            }
            // This header sets a subdevice mask. The card has only one subdevice.
            HeaderOp::OldIncreasing | HeaderOp::OldNonIncreasing => continue,
            HeaderOp::Immediate => {
                walk.method(header.subchannel(), header.method(), header.count().into());
                continue;
            }
            HeaderOp::EndSegment | HeaderOp::Reserved => return,
            _ => (header.subchannel(), header.method(), header.count()),
        };
        let steps = match header.op() {
            HeaderOp::NonIncreasing | HeaderOp::OldNonIncreasing => 0,
            HeaderOp::IncreaseOnce => 1,
            _ => u32::MAX,
        };
        for (index, datum) in (0..).zip(words.by_ref().take(count.into())) {
            let method = first.saturating_add(steps.min(index).saturating_mul(4));
            walk.method(subchannel, method, datum);
        }
    }
}

impl<F: FnMut(GpuVa, u64)> Walk<'_, F> {
    fn method(&mut self, subchannel: u8, method: u32, datum: u32) {
        let Some(object) = self.objects.0.get_mut(usize::from(subchannel)) else { return };
        if method == host_method::SET_OBJECT {
            *object = host_method::set_object::CLASS.get(datum);
            return;
        }
        let Some(class) = CLASSES.iter().find(|class| class.numbers.contains(object)) else { return };
        self.data.insert((subchannel, method), datum);
        let get = |method: u32| self.data.get(&(subchannel, method)).copied().unwrap_or(0);
        let address = |(high, low)| GpuVa((u64::from(get(high)) << 32 | u64::from(get(low))) & VA_MASK);
        if let Some(point) = class.points.iter().find(|(_, low)| *low == method) {
            (self.each)(address(*point), 1);
        }
        if let Some(copy) = class.copy.as_ref().filter(|copy| copy.exec == method) {
            for (side, pitch) in copy.sides {
                let line = u64::from(get(copy.line).max(get(pitch)));
                let whole = line.saturating_mul(get(copy.lines).into());
                (self.each)(address(side), whole.clamp(1, SURFACE_MAX));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rig::driver::{CE0, M2MF, ce_copy, m2mf_copy, methods, object};

    fn named(words: &[u32], objects: &mut Objects) -> Vec<(u64, u64)> {
        let mut all = Vec::new();
        walk(words, objects, |va, bytes| all.push((va.0, bytes)));
        all
    }

    #[test]
    fn copies_name_both_sides_with_their_sizes() {
        let mut objects = Objects([0; 8]);
        let words =
            [object(CE0), ce_copy(0x12_3456_7000, 0x20_0000, 3), object(M2MF), m2mf_copy(0x1000, 0x5000, 0x2345)];
        let found = named(&words.concat(), &mut objects);
        assert_eq!(found.iter().map(|(va, _)| *va).collect::<Vec<_>>(), [0x12_3456_7000, 0x20_0000, 0x1000, 0x5000]);
        assert_eq!(found[0].1, 3 * 4096);
        assert!(found[2].1 >= 0x2345 && found[3].1 >= 0x2345, "{found:x?}");
        // The binding persists across submissions.
        assert_eq!(named(&ce_copy(0x1000, 0x2000, 1), &mut objects).len(), 2);
    }

    #[test]
    fn headers_of_the_older_form_name_the_same() {
        let old = |op: u8, method: u32, data: &[u32]| {
            let header = OldMethodHeader::new().with_opcode(op).with_sub_op(sub_op::METHODS).with_subchannel(1);
            let header = header.with_method_dwords((method >> 2) as u16).with_count(data.len() as u16);
            [&[u32::from(header)][..], data].concat()
        };
        let code = old(0, compute90c0::CODE_ADDRESS_HIGH, &[0x2, 0x3000]);
        // If a method is repeated, only its last value counts.
        let semaphore = [
            old(2, compute90c0::SEMAPHORE_ADDRESS_HIGH, &[0x7, 0x1]),
            old(0, compute90c0::SEMAPHORE_ADDRESS_LOW, &[0x4000]),
        ];
        let words = [code, semaphore.concat()].concat();
        assert_eq!(named(&words, &mut Objects::default()), [(0x2_0000_3000, 1), (0x1_0000_4000, 1)]);
    }

    #[test]
    fn kernels_name_their_code_and_constants() {
        let words = [
            methods(1, compute90c0::CODE_ADDRESS_HIGH, &[0x2, 0x3000]),
            methods(1, compute90c0::CONSTANT_ADDRESS_HIGH, &[0x1, 0x4000]),
        ];
        assert_eq!(named(&words.concat(), &mut Objects::default()), [(0x2_0000_3000, 1), (0x1_0000_4000, 1)]);
    }

    #[test]
    fn work_of_unbound_object_refers_to_no_memory() {
        let mut objects = Objects([0; 8]);
        assert_eq!(named(&ce_copy(0x1000, 0x2000, 1), &mut objects), []);
        // Try headers of all kinds, including some with word counts beyond the buffer's end.
        for word in (0..=u32::MAX).step_by(0x1_0001) {
            let found = named(&[word, word, !word], &mut Objects::default());
            assert!(found.iter().all(|(va, bytes)| *va <= VA_MASK && (1..=SURFACE_MAX).contains(bytes)));
        }
    }
}
