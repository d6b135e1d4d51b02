//! Tests that every function is described, and that each side decodes the other side's messages.

#![allow(unsafe_code, reason = "the encoder reads through pointers")]

use std::collections::{BTreeMap, BTreeSet};

use crate::boxes::{ARRAY, BoxCopy, DEVICE, End, HOST};
use crate::describe::{Arg, Call, Kind, Numbered, Treatment, handle, index_of, kind_of};
use crate::{Arena, CALLS, Fault, Handles, REFUSED, decode, encode, find, unpack};

/// Objects by handle.
#[derive(Default)]
struct Table(BTreeMap<u64, u64>);

impl Handles for Table {
    fn find(&self, kind: Kind, handle: u64) -> Result<u64, Fault> {
        if kind == Kind::Stream && handle <= 2 {
            return Ok(handle);
        }
        index_of(kind, handle).ok_or(Fault::Malformed)?;
        self.0.get(&handle).copied().ok_or(Fault::Refused(400))
    }

    fn is_free(&self, kind: Kind, handle: u64) -> bool {
        index_of(kind, handle).is_some() && !self.0.contains_key(&handle)
    }

    fn has_range(&self, address: u64, bytes: u64) -> bool {
        address == 3 && bytes <= 3
    }

    fn image(&self) -> u64 {
        0x77
    }

    fn image_bytes(&self) -> u64 {
        0x78
    }

    fn has_number(&self, _: Numbered, number: u64) -> bool {
        number == 3
    }
}

fn plain(symbol: &str) -> &str {
    symbol.trim_end_matches("_ptsz").trim_end_matches("_ptds")
}

#[test]
fn each_symbol_of_the_table_is_described_once() {
    let all: BTreeSet<String> = cuda_table::symbols().map(|(name, ..)| plain(&name).to_owned()).collect();
    let described: BTreeSet<&str> = CALLS.iter().map(|call| call.name).collect();
    assert_eq!(described.len(), CALLS.len(), "a function has two descriptions");
    let refused: BTreeSet<&str> = REFUSED.iter().copied().collect();
    assert_eq!(refused.len(), REFUSED.len(), "a function is listed twice in `REFUSED`");
    let missing: Vec<_> =
        all.iter().filter(|name| !described.contains(name.as_str()) && !refused.contains(name.as_str())).collect();
    assert!(missing.is_empty(), "not described: {missing:?}");
    let both: Vec<_> = described.intersection(&refused).collect();
    assert!(both.is_empty(), "in both `CALLS` and `REFUSED`: {both:?}");
    let is_known = |name: &str| all.contains(name) || cuda_table::NVML.contains(&name);
    let unknown: Vec<_> =
        described.iter().chain(&refused).filter(|name| !is_known(name.trim_end_matches(['+', '-']))).collect();
    assert!(unknown.is_empty(), "not in the table: {unknown:?}");
}

#[test]
fn handle_names_its_kind_and_number() {
    for kind in [Kind::Context, Kind::Stream, Kind::Function, Kind::Gpu] {
        let made = handle(kind, 77);
        assert_eq!((kind_of(made), index_of(kind, made)), (Some(kind), Some(77)));
    }
    for wrong in [0, 1, 2, handle(Kind::Stream, 7) + 1, handle(Kind::Stream, 0), 0x7fff_0000_1000, u64::MAX] {
        assert_eq!(kind_of(wrong), None, "{wrong:#x}");
    }
    assert_eq!(index_of(Kind::Event, handle(Kind::Stream, 1)), None);
}

/// Returns a 3-byte copy in card memory.
fn copy() -> BoxCopy {
    let end = End { kind: DEVICE, address: 3, ..End::default() };
    BoxCopy { from: end, to: end, width: 3, height: 1, depth: 1 }
}

/// Returns the resource description of a texture with three bytes of memory.
fn linear() -> [u64; 18] {
    let mut words = [0; 18];
    words[..4].copy_from_slice(&[2, 3, 1 | 1 << 32, 3]);
    words
}

/// Returns arguments for any call: pointers to a buffer, and handles of the described kinds.
fn arguments(call: &Call, buffer: &mut [u64], table: &mut Table) -> Vec<u64> {
    let at = buffer.as_mut_ptr().addr() as u64;
    let mut value = |arg: &Arg| match *arg {
        Arg::Word | Arg::Address | Arg::Range(_) | Arg::DropNumber(_) => 3,
        Arg::PlainAttribute => 8,
        Arg::Copy2d => {
            buffer[70..86].copy_from_slice(&copy().to_2d());
            at + 8 * 70
        }
        Arg::Copy3d => {
            buffer[90..115].copy_from_slice(&copy().to_3d());
            at + 8 * 90
        }
        Arg::Resource => {
            buffer[120..138].copy_from_slice(&linear());
            at + 8 * 120
        }
        Arg::Handle(kind) | Arg::Optional(kind) | Arg::Drop(kind) => {
            let made = handle(kind, 5);
            table.0.insert(made, 0x9000 + kind as u64);
            made
        }
        Arg::Null => 0,
        Arg::Image => 1,
        Arg::InAddressed(_) => {
            buffer[200] = 3;
            at + 8 * 200
        }
        Arg::Handles(kind, _) => {
            table.0.insert(handle(kind, 5), 0x9000 + kind as u64);
            buffer[..64].fill(handle(kind, 5));
            at
        }
        _ => at,
    };
    call.args.iter().map(&mut value).collect()
}

#[test]
fn each_described_call_crosses_with_its_results() {
    for call in CALLS.iter().filter(|call| call.treatment != Treatment::Guest) {
        let mut buffer = vec![0x4142_4344_4546_u64; 256];
        let mut table = Table::default();
        let args = arguments(call, &mut buffer, &mut table);
        let mut words = Vec::new();
        // SAFETY: all pointers refer to the buffer, which is larger than any argument.
        let encoded = unsafe { encode(call, &args, &mut |kind| handle(kind, 9), &mut words) };
        let encoded = encoded.unwrap_or_else(|code| panic!("{}: {code}", call.name));
        let mut arena = Arena::default();
        let prepared =
            decode(call, &words, &table, &mut arena).unwrap_or_else(|fault| panic!("{}: {fault:?}", call.name));
        assert_eq!(prepared.results(&arena).count(), encoded.result_words, "{}", call.name);
        for ((arg, given), passed) in call.args.iter().zip(&args).zip(prepared.values) {
            match arg {
                Arg::Word | Arg::Address | Arg::Range(_) | Arg::DropNumber(_) | Arg::PlainAttribute => {
                    assert_eq!(passed, *given);
                }
                Arg::Handle(kind) | Arg::Optional(kind) | Arg::Drop(kind) => assert_eq!(passed, 0x9000 + *kind as u64),
                Arg::Null => assert_eq!(passed, 0),
                Arg::Image => assert_eq!(passed, 0x77),
                Arg::ImageBytes => assert_eq!(passed, 0x78),
                _ => assert_ne!(passed, 0, "{}", call.name),
            }
        }
        assert_eq!(prepared.new.map(|(kind, made, _)| (kind, made)), encoded.new);
        let results: Vec<u64> = (0..encoded.result_words as u64).map(|n| 0x1111_1111 * (n + 1)).collect();
        // SAFETY: as above.
        unsafe { unpack(call, &args, &results) };
    }
}

#[test]
fn results_reach_the_program_and_no_other_memory() {
    let call = &CALLS[find("cuDeviceComputeCapability").expect("described")];
    let (mut major, mut minor) = ([0u32, 7], [0u32, 8]);
    let args = [major.as_mut_ptr().addr() as u64, minor.as_mut_ptr().addr() as u64, 0];
    // SAFETY: the pointers refer to local variables.
    unsafe { unpack(call, &args, &[9, 1]) };
    assert_eq!((major, minor), ([9, 7], [1, 8]));
}

#[test]
fn wrong_arguments_fail_in_the_guest() {
    let mut words = Vec::new();
    let mut fresh = |kind| handle(kind, 1);
    let mut code = |name: &str, args: &[u64]| {
        let call = &CALLS[find(name).expect("described")];
        // SAFETY: no pointer is dereferenced, because each is null or the call fails first.
        unsafe { encode(call, args, &mut fresh, &mut words) }.err()
    };
    assert_eq!(code("cuStreamCreate", &[0, 0]), Some(1));
    assert_eq!(code("cuEventDestroy_v2", &[handle(Kind::Stream, 1)]), Some(400));
    assert_eq!(code("cuEventDestroy_v2", &[0x7fff_1234_5678]), Some(400));
    assert_eq!(code("cuEventElapsedTime", &[0, handle(Kind::Event, 1), handle(Kind::Event, 2)]), Some(1));
    assert_eq!(code("cuGraphLaunch", &[handle(Kind::Exec, 1), 2]), None);
}

#[test]
fn address_of_the_worker_is_refused() {
    let (mut arena, table) = (Arena::default(), Table::default());
    let set = &CALLS[find("cuMemsetD8_v2").expect("described")];
    let copy = &CALLS[find("cuMemcpyDtoD_v2").expect("described")];
    assert!(decode(set, &[3, 0, 1], &table, &mut arena).is_ok());
    assert!(decode(copy, &[3, 3, 3], &table, &mut arena).is_ok());
    assert_eq!(decode(set, &[0x7fff_0000, 0, 1], &table, &mut arena).err(), Some(Fault::Refused(1)));
    assert_eq!(decode(copy, &[3, 3, 4], &table, &mut arena).err(), Some(Fault::Refused(1)));
    assert_eq!(decode(copy, &[3, 0x7fff_0000, 1], &table, &mut arena).err(), Some(Fault::Refused(1)));
}

#[test]
fn any_words_decode_or_are_refused() {
    let mut random = fastrand::Rng::with_seed(7);
    let (mut table, mut arena) = (Table::default(), Arena::default());
    let mut buffer = vec![0; 256];
    for call in CALLS {
        arguments(call, &mut buffer, &mut table);
        for _ in 0..200 {
            let length = random.usize(..40);
            let known: Vec<u64> = table.0.keys().copied().collect();
            let words: Vec<u64> = (0..length)
                .map(|_| match random.u8(..6) {
                    0 => random.u64(..),
                    1 if !known.is_empty() => known[random.usize(..known.len())],
                    2 => u64::MAX - random.u64(..9),
                    _ => random.u64(..40),
                })
                .collect();
            if let Ok(prepared) = decode(call, &words, &table, &mut arena) {
                assert!(prepared.results(&arena).count() <= 9000);
            }
        }
    }
}

/// A tensor map has one stride fewer than dimensions.
#[test]
fn tensor_map_crosses_with_its_arrays() {
    let call = &CALLS[find("cuTensorMapEncodeTiled").expect("described")];
    let (sizes, strides) = ([8u64, 9, 10], [80u64, 720]);
    let (block, steps) = ([1u32, 2, 3], [1u32, 1, 1]);
    let mut map = [0u64; 16];
    let pointer = |at: *const u64| at.addr() as u64;
    let (block, steps) = (pointer(block.as_ptr().cast()), pointer(steps.as_ptr().cast()));
    let map = pointer(map.as_mut_ptr());
    let args = [map, 6, 3, 3, pointer(sizes.as_ptr()), pointer(strides.as_ptr()), block, steps, 0, 1, 2, 0];
    let mut words = Vec::new();
    // SAFETY: the pointers refer to local arrays of the described lengths.
    unsafe { encode(call, &args, &mut |kind| handle(kind, 9), &mut words) }.expect("encoded");
    let (table, mut arena) = (Table::default(), Arena::default());
    let prepared = decode(call, &words, &table, &mut arena).expect("decoded");
    // SAFETY: the decoder has written the arrays to these addresses.
    unsafe {
        assert_eq!((prepared.values[4] as *const [u64; 3]).read(), sizes);
        assert_eq!((prepared.values[5] as *const [u64; 2]).read(), strides);
        assert_eq!((prepared.values[6] as *const [u32; 3]).read(), [1, 2, 3]);
    }
    assert_eq!((prepared.values[2], prepared.values[3], prepared.values[9]), (3, 3, 1));
}

/// Decodes a call from these words and returns its first argument.
fn decoded(name: &str, words: &[u64], table: &Table, arena: &mut Arena) -> Result<u64, Fault> {
    let call = &CALLS[find(name).expect("described")];
    decode(call, words, table, arena).map(|prepared| prepared.values[0])
}

#[test]
fn copy_of_the_workers_memory_is_refused() {
    let (table, mut arena) = (Table::default(), Arena::default());
    let mut ask = |copy: BoxCopy| {
        let words = [&copy.to_3d()[..], &[0]].concat();
        decoded("cuMemcpy3DAsync_v2+", &words, &table, &mut arena).map(drop)
    };
    let refused = Err(Fault::Refused(1));
    assert_eq!(ask(copy()), Ok(()));
    assert_eq!(ask(BoxCopy { width: 4, ..copy() }), refused, "beyond the card's memory");
    assert_eq!(ask(BoxCopy { width: 1, height: 4, ..copy() }), refused, "its last row is");
    let worker = End { kind: HOST, address: 0x7fff_0000, ..End::default() };
    assert_eq!(ask(BoxCopy { from: worker, ..copy() }), refused);
    assert_eq!(ask(BoxCopy { to: worker, ..copy() }), refused);
    assert_eq!(ask(BoxCopy { to: End { kind: 7, ..copy().to }, ..copy() }), refused, "unknown memory type");
    let missing = End { kind: ARRAY, array: handle(Kind::Array, 9), ..End::default() };
    assert_eq!(ask(BoxCopy { to: missing, ..copy() }), Err(Fault::Refused(400)));
    let wrong = End { kind: ARRAY, array: 0x1234, ..End::default() };
    assert_eq!(ask(BoxCopy { to: wrong, ..copy() }), Err(Fault::Malformed));
}

#[test]
fn attribute_with_a_handle_is_refused() {
    let (mut table, mut arena) = (Table::default(), Arena::default());
    let node = handle(Kind::Node, 1);
    table.0.insert(node, 0xabc);
    let mut ask = |id| {
        let words = [&[node, id], &[0; 8][..]].concat();
        decoded("cuGraphKernelNodeSetAttribute", &words, &table, &mut arena)
    };
    assert_eq!(ask(8), Ok(0xabc));
    // `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT` and `.._ACCESS_POLICY_WINDOW`.
    for id in [7, 1] {
        assert_eq!(ask(id), Err(Fault::Refused(801)));
    }
}

#[test]
fn arrays_in_copies_and_resources_are_the_drivers() {
    let (mut table, mut arena) = (Table::default(), Arena::default());
    let array = handle(Kind::Array, 2);
    table.0.insert(array, 0xabc);
    let to = End { kind: ARRAY, array, x: 7, ..End::default() };
    let words = [&BoxCopy { to, ..copy() }.to_3d()[..], &[0]].concat();
    let at = decoded("cuMemcpy3DAsync_v2+", &words, &table, &mut arena).expect("decoded");
    // SAFETY: the decoder has written the structure to this address.
    let found = BoxCopy::from_3d(unsafe { &*(at as *const [u64; 25]) });
    assert_eq!(found.to, End { array: 0xabc, ..to });
    let resource = |first: [u64; 2]| {
        let mut words = linear();
        words[..2].copy_from_slice(&first);
        words
    };
    let call = &CALLS[find("cuSurfObjectCreate").expect("described")];
    let prepared = decode(call, &resource([0, array]), &table, &mut arena).expect("decoded");
    // SAFETY: as above.
    assert_eq!(unsafe { (prepared.values[1] as *const [u64; 2]).read() }, [0, 0xabc]);
    let mut ask = |words: [u64; 18]| decode(call, &words, &table, &mut arena).err();
    assert_eq!(ask(resource([2, 0x7fff_0000])), Some(Fault::Refused(1)), "worker memory");
    assert_eq!(ask(resource([9, 3])), Some(Fault::Refused(1)), "unknown resource type");
    assert_eq!(ask(resource([1, array])), Some(Fault::Malformed), "array handle as a mipmapped array");
}
