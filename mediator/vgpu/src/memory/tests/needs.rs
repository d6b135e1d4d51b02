//! Tests the detection of the engines that push buffers of the rig's driver need.

use card_manager::{Bindings, Needs, Reader};
use rig::driver::{CE0, CE1, M2MF, ce_copy, m2mf_copy, methods, object};
use sched::Engine;

/// Maximum number of words read per submission.
const WORDS: usize = 4096;

/// Returns the engines that a submission with these push buffers needs.
fn needs(bindings: &mut Bindings, ranges: &[&[u32]]) -> Needs {
    let mut reader = Reader::new(bindings);
    for words in ranges {
        reader.range(words.len() as u32, |first, bytes| {
            let words = words[first..].iter().flat_map(|word| word.to_le_bytes());
            bytes.iter_mut().zip(words).for_each(|(to, byte)| *to = byte);
            Some(())
        });
    }
    reader.needs()
}

fn needs_of(words: &[u32]) -> Needs {
    needs(&mut Bindings::default(), &[words])
}

const CE0_ONLY: Needs = Needs::Copies(Engine::Copy0);

#[test]
fn copies_need_copy_engine_bound_to_subchannel() {
    let copy = ce_copy(0x1000, 0x2000, 1);
    assert_eq!(needs_of(&[object(CE0), copy.repeat(100)].concat()), CE0_ONLY);
    assert_eq!(needs_of(&[object(CE1), copy.clone()].concat()), Needs::Copies(Engine::Copy1));
    assert_eq!(needs_of(&copy), Needs::Graphics, "the binding of its subchannel is unknown");
    // A binding persists across submissions.
    let mut bindings = Bindings::default();
    assert_eq!(needs(&mut bindings, &[&object(CE0)]), Needs::Host);
    assert_eq!(needs(&mut bindings, &[&copy]), CE0_ONLY);
    // If work was not read completely, its bindings are unknown afterwards.
    assert_eq!(needs(&mut bindings, &[&object(M2MF)]), Needs::Graphics);
    assert_eq!(needs(&mut bindings, &[&copy]), Needs::Graphics);
}

#[test]
fn work_with_one_method_for_pgraph_needs_pgraph() {
    let copies = [object(CE0), ce_copy(0x1000, 0x2000, 1)].concat();
    for graphics in [[object(M2MF), m2mf_copy(0x1000, 0x2000, 16)].concat(), methods(2, 0x100, &[0])] {
        assert_eq!(needs_of(&[copies.clone(), graphics.clone()].concat()), Needs::Graphics);
        assert_eq!(needs_of(&[graphics, copies.clone()].concat()), Needs::Graphics);
    }
    // The same applies to a PGRAPH method with immediate data, and to an invalid header.
    assert_eq!(needs_of(&[copies.clone(), vec![4 << 29 | 1 << 16 | 2 << 13 | 0x100 >> 2]].concat()), Needs::Graphics);
    assert_eq!(needs_of(&[copies, vec![6 << 29]].concat()), Needs::Graphics);
}

#[test]
fn methods_of_the_host_need_no_engine() {
    assert_eq!(needs_of(&[methods(0, 0x10, &[0, 0x3000, 7, 1]), methods(5, 0x20, &[0])].concat()), Needs::Host);
    assert_eq!(needs_of(&[]), Needs::Host);
}

#[test]
fn data_of_a_method_may_lie_in_the_next_range() {
    let mut bindings = Bindings::default();
    let [header, datum] = object(CE0)[..] else { panic!("a header and its datum") };
    let copy = ce_copy(0x1000, 0x2000, 1);
    assert_eq!(needs(&mut bindings, &[&[header], &[datum], &copy[..3], &copy[3..]]), CE0_ONLY);
    // Data words that look like headers do not count, and neither does a header beyond the end of a segment.
    let graphics = methods(2, 0x300, &[0]);
    let data = methods(4, 0x310, &[graphics[0]]);
    assert_eq!(needs(&mut bindings, &[&[data, vec![7 << 29], graphics.clone()].concat()]), CE0_ONLY);
    assert_eq!(needs(&mut bindings, &[&[7 << 29], &graphics]), Needs::Graphics);
}

#[test]
fn work_that_is_too_long_or_cannot_be_read_needs_pgraph() {
    let long = [object(CE0), vec![0; WORDS]].concat();
    assert_eq!(needs_of(&long[..WORDS]), Needs::Host);
    assert_eq!(needs_of(&long), Needs::Graphics);
    let mut bindings = Bindings::default();
    let mut reader = Reader::new(&mut bindings);
    reader.range(3, |_, _| None);
    assert_eq!(reader.needs(), Needs::Graphics);
    for word in (0..=u32::MAX).step_by(0x1_0001) {
        needs_of(&[word, word, !word]);
    }
}
