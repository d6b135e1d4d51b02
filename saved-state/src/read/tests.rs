use super::*;
use crate::{Unversioned, WriteError, Writer, ascend, first_version, only_version};
use proptest::prelude::*;
use serde::{Deserialize, Serialize};

const IDENTITY: [u8; 16] = *b"of a single file";

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct First {
    a: u32,
    list: Vec<u64>,
}

first_version!(First, "first");

/// An earlier version of [`Second`], without a name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct SecondBefore {
    number: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Second {
    number: u64,
    name: String,
}

impl Part for Second {
    const NAME: &'static str = "second";
    const VERSION: u32 = 7;
    type Before = SecondBefore;

    fn from_before(before: SecondBefore) -> Result<Self, Invalid> {
        Invalid::unless(before.number != 13, || "13 is no longer valid".into())?;
        Ok(Self { number: before.number, name: String::new() })
    }

    fn to_before(&self) -> Result<SecondBefore, Invalid> {
        Invalid::unless(self.name.is_empty(), || format!("it had no name, and this is `{}`", self.name))?;
        Ok(SecondBefore { number: self.number })
    }
}

fn known() -> Vec<Known> {
    vec![Known::for_part::<First>(), Known::for_part::<Second>()]
}

fn first() -> First {
    First { a: 5, list: vec![1, u64::MAX, 3] }
}

fn second(name: &str) -> Second {
    Second { number: 9, name: name.to_owned() }
}

fn file(identity: [u8; 16]) -> Vec<u8> {
    let mut writer = Writer::new(identity);
    writer.put(0, &first()).unwrap();
    writer.put(3, &second("x")).unwrap();
    writer.put(4, &second("y")).unwrap();
    writer.finish()
}

fn refused(file: &[u8]) -> ReadError {
    SavedState::parse(file, &known()).expect_err("it was read")
}

#[test]
fn written_parts_are_read_once_and_leftover_is_reported() {
    let file = file(IDENTITY);
    let mut state = SavedState::parse(&file, &known()).unwrap();
    assert_eq!((state.owners::<First>(), state.owners::<Second>()), (vec![0], vec![3, 4]));
    assert_eq!(state.take::<Second>(4).unwrap().name, "y");
    assert_eq!(state.take::<Second>(4), Err(ReadError::Missing { name: "second", of: 4 }));
    assert_eq!(state.take::<First>(0), Ok(first()));
    assert_eq!(state.finish(), Err(ReadError::Left { name: "second".into(), of: 3 }));
}

#[test]
fn a_part_is_written_once() {
    let mut writer = Writer::new(IDENTITY);
    writer.put(0, &first()).unwrap();
    assert_eq!(writer.put(0, &first()), Err(WriteError::Twice { name: "first", of: 0 }));
}

#[test]
fn the_version_before_is_read_and_written() {
    let older = vec![Known { name: "second".into(), version: 6 }];
    let mut writer = Writer::for_reader(IDENTITY, older.clone());
    writer.put(1, &second("")).unwrap();
    let named = writer.put(2, &second("x")).unwrap_err();
    assert!(named.to_string().contains("this is `x`"), "{named}");
    let foreign = writer.put(0, &first()).unwrap_err();
    assert_eq!(foreign, WriteError::Version { name: "first", version: 1, reads: None });
    let file = writer.finish();
    // Both the older program and this one can read the file.
    SavedState::parse(&file, &older).unwrap();
    let mut state = SavedState::parse(&file, &known()).unwrap();
    assert_eq!(state.take::<Second>(1), Ok(second("")));

    let newer = vec![Known { name: "second".into(), version: 8 }];
    let mut writer = Writer::for_reader(IDENTITY, newer.clone());
    writer.put(1, &second("x")).unwrap();
    SavedState::parse(&writer.finish(), &newer).unwrap();
}

/// A part with a first version that is no longer supported.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Third {
    number: u64,
}

only_version!(Third, "third", 2);

#[test]
fn only_version_is_not_exchanged_with_its_predecessor() {
    let version = |version| vec![Known { name: "third".into(), version }];
    let mut writer = Writer::for_reader(IDENTITY, version(1));
    let error = writer.put(1, &Third { number: 1 }).unwrap_err();
    assert!(error.to_string().contains("no earlier version is written"), "{error}");
    let mut writer = Writer::for_reader(IDENTITY, version(2));
    writer.put(1, &Third { number: 1 }).unwrap();
    let file = writer.finish();
    assert!(SavedState::parse(&file, &version(1)).is_err(), "a program with version 1 rejects it");
    assert_eq!(SavedState::parse(&file, &[Known::for_part::<Third>()]).unwrap().take(1), Ok(Third { number: 1 }));
}

#[test]
fn versions_further_away_are_refused() {
    for reads in [0, 5, 9] {
        let mut writer = Writer::for_reader(IDENTITY, vec![Known { name: "second".into(), version: reads }]);
        let error = writer.put(1, &second("")).unwrap_err();
        assert_eq!(error, WriteError::Version { name: "second", version: 7, reads: Some(reads) });
    }
    let file = file(IDENTITY);
    for version in [0, 5, 6, 9] {
        let known = [Known::for_part::<First>(), Known { name: "second".into(), version }];
        let error = SavedState::parse(&file, &known).unwrap_err();
        assert_eq!(error, ReadError::Version { name: "second".into(), of: 3, version: 7, known: version });
    }
    assert!(
        SavedState::parse(&file, &[Known::for_part::<First>(), Known { name: "second".into(), version: 8 }]).is_ok()
    );
}

#[test]
fn obsolete_value_of_older_version_is_rejected() {
    let mut writer = Writer::for_reader(IDENTITY, vec![Known { name: "second".into(), version: 6 }]);
    writer.put(1, &Second { number: 13, name: String::new() }).unwrap();
    let file = writer.finish();
    let error = SavedState::parse(&file, &known()).unwrap().take::<Second>(1).unwrap_err();
    assert!(error.to_string().contains("`second` of 1 is invalid: 13 is no longer valid"), "{error}");
}

#[test]
fn an_unknown_section_is_refused_by_name() {
    let error = SavedState::parse(&file(IDENTITY), &[Known::for_part::<First>()]).unwrap_err();
    assert_eq!(error, ReadError::Unknown { name: "second".into(), of: 3 });
}

#[test]
fn a_section_of_another_file_is_refused() {
    let (one, other) = (file(IDENTITY), file([7; 16]));
    // Both files have the same parts, so they differ only in their identities and checksums.
    let mut mixed = one.clone();
    let at = mixed.windows(6).position(|bytes| bytes == b"second").unwrap();
    mixed[at..].copy_from_slice(&other[at..]);
    assert_eq!(refused(&mixed), ReadError::Sum { name: "second".into(), of: 3 });
}

#[test]
fn sections_that_have_changed_places_are_refused() {
    let mut file = file(IDENTITY);
    let at = file.windows(6).rposition(|bytes| bytes == b"second").unwrap() + 6;
    // Relabel the state of VM 4 as that of VM 5.
    file[at] = 5;
    assert_eq!(refused(&file), ReadError::Sum { name: "second".into(), of: 5 });
}

#[test]
fn other_files_are_refused() {
    assert_eq!(refused(b""), ReadError::Magic);
    assert_eq!(refused(b"#!/bin/sh\n"), ReadError::Magic);
    let mut newer = file(IDENTITY);
    newer[8] = 2;
    assert_eq!(refused(&newer), ReadError::Format(2));
    let mut many = file(IDENTITY);
    many[28..32].copy_from_slice(&u32::MAX.to_le_bytes());
    assert_eq!(refused(&many), ReadError::Sections(u32::MAX));
    let mut longer = file(IDENTITY);
    longer.push(0);
    assert_eq!(refused(&longer), ReadError::Behind(1));
    let mut twice = file(IDENTITY);
    let from = twice.windows(5).position(|bytes| bytes == b"first").unwrap() - 1;
    let to = twice.windows(6).position(|bytes| bytes == b"second").unwrap() - 1;
    let again = twice[from..to].to_vec();
    twice.extend(again);
    twice[28] += 1;
    assert_eq!(refused(&twice), ReadError::Twice { name: "first".into(), of: 0 });
}

#[test]
fn missing_long_list_allocates_no_memory() {
    let mut writer = Writer::new(IDENTITY);
    /// A part that claims to contain a list of almost 2^63 numbers.
    #[derive(Serialize, Deserialize)]
    struct Liar(u32, u64);
    impl Part for Liar {
        const NAME: &'static str = "first";
        const VERSION: u32 = 1;
        type Before = Unversioned;
        fn from_before(before: Unversioned) -> Result<Self, Invalid> {
            match before {}
        }
        fn to_before(&self) -> Result<Unversioned, Invalid> {
            Err(Invalid::new(""))
        }
    }
    writer.put(0, &Liar(1, u64::MAX >> 1)).unwrap();
    let file = writer.finish();
    let error = SavedState::parse(&file, &known()).unwrap().take::<First>(0).unwrap_err();
    assert_eq!(error, ReadError::Encoding { name: "first", of: 0 });
}

#[test]
fn keys_ascend_or_do_not() {
    assert!(ascend([1, 2, 9]) && ascend(Vec::<u8>::new()));
    assert!(!ascend([1, 1]) && !ascend([2, 1]));
}

proptest! {
    /// Truncates or modifies a file. The reader must reject it without panicking.
    #[test]
    fn damage_is_found(at in any::<prop::sample::Index>(), flip in 1u8.., cut in any::<prop::sample::Index>()) {
        let whole = file(IDENTITY);
        let mut damaged = whole.clone();
        damaged[at.index(whole.len())] ^= flip;
        prop_assert!(SavedState::parse(&damaged, &known()).is_err());
        prop_assert!(SavedState::parse(&whole[..cut.index(whole.len())], &known()).is_err());
    }

    /// Reads arbitrary bytes. The reader must accept or reject them without panicking.
    #[test]
    fn bytes_are_read_or_refused(mut bytes in prop::collection::vec(any::<u8>(), 0..200), magic: bool) {
        if magic {
            bytes.splice(0..0, MAGIC);
        }
        let _ = SavedState::parse(&bytes, &known());
    }
}
