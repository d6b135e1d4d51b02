use super::*;
use proptest::prelude::*;

/// An item with its bytes, as received by the sink.
#[derive(Debug, PartialEq, Eq)]
enum Whole {
    Head(Vec<u8>),
    Piece(u64, Vec<u8>),
}

fn stream(head: &[u8], pieces: &[(u64, Vec<u8>)]) -> Vec<u8> {
    let (mut writer, mut bytes) = StreamWriter::new(head);
    for (at, data) in pieces {
        bytes.extend(writer.piece(*at, data));
    }
    bytes.extend(writer.end());
    bytes
}

/// Reads a stream in portions of `part` bytes.
fn read(bytes: &[u8], part: usize) -> Result<Vec<Whole>, StreamError> {
    let mut reader = StreamReader::default();
    let mut all = Vec::new();
    for part in bytes.chunks(part) {
        reader.feed(part, &mut |item| {
            all.push(match item {
                Item::Head(head) => Whole::Head(head.to_vec()),
                Item::Piece(at, data) => Whole::Piece(at, data.to_vec()),
            });
            Ok::<_, StreamError>(())
        })?;
    }
    reader.finish()?;
    Ok(all)
}

fn sample() -> Vec<u8> {
    stream(b"the head", &[(0, vec![1; 5000]), (0x10_0000, vec![2; 70]), (0x20_0000, vec![3; 1])])
}

#[test]
fn stream_reads_back_in_parts_of_any_length() {
    let bytes = sample();
    let all = read(&bytes, bytes.len()).unwrap();
    assert_eq!(all.len(), 4);
    assert_eq!((&all[0], &all[3]), (&Whole::Head(b"the head".to_vec()), &Whole::Piece(0x20_0000, vec![3])));
    for part in [1, 7, 32, 4096] {
        assert_eq!(read(&bytes, part).unwrap(), all);
    }
    assert_eq!(read(&stream(b"", &[]), 3).unwrap(), [Whole::Head(Vec::new())]);
}

#[test]
fn each_cut_is_found() {
    let bytes = sample();
    for length in 0..bytes.len() {
        let refused = read(&bytes[..length], 999).unwrap_err();
        assert_eq!(refused, StreamError::Cut(length as u64));
    }
}

#[test]
fn each_byte_counts() {
    let bytes = sample();
    for at in 0..bytes.len() {
        let mut bytes = bytes.clone();
        bytes[at] ^= 0x41;
        read(&bytes, 512).expect_err("a byte was changed");
    }
}

#[test]
fn missing_repeated_or_foreign_pieces_are_rejected() {
    let pieces = [(0, vec![1; 64]), (0x1000, vec![2; 64]), (0x2000, vec![3; 64])];
    let (mut writer, first) = StreamWriter::new(b"one");
    let made = pieces.each_ref().map(|(at, data)| writer.piece(*at, data));
    let end = writer.end();
    let all = |parts: &[&[u8]]| read(&parts.concat(), 100);
    all(&[&first, &made[0], &made[1], &made[2], &end]).unwrap();
    for parts in [[&made[1], &made[2]], [&made[0], &made[2]], [&made[0], &made[1]]] {
        let refused = all(&[&first, parts[0], parts[1], &end]).unwrap_err();
        assert!(matches!(refused, StreamError::Sum(_)), "{refused}");
    }
    assert_eq!(all(&[&first, &made[0], &made[0], &end]), Err(StreamError::Order(0)));
    let (_, other) = StreamWriter::new(b"two");
    assert!(matches!(all(&[&other, &made[0], &made[1], &made[2], &end]), Err(StreamError::Sum(_))));
    assert_eq!(all(&[&first, &made[0], &made[1], &made[2], &end, b"x"]), Err(StreamError::Behind));
}

#[test]
fn nothing_is_believed_that_is_too_long() {
    let claim = |length: u64| [MAGIC.as_slice(), &FORMAT.to_le_bytes(), &length.to_le_bytes(), &[0; 64]].concat();
    assert_eq!(read(&claim(u64::MAX), 8), Err(StreamError::Head(u64::MAX)));
    assert!(matches!(read(&claim(HEAD_MAX as u64), 8), Err(StreamError::Cut(_))));
    let (_, first) = StreamWriter::new(b"");
    let piece = |at: u64, length: u32| [first.as_slice(), &at.to_le_bytes(), &length.to_le_bytes(), &[0; 64]].concat();
    assert_eq!(read(&piece(0, u32::MAX), 64), Err(StreamError::Piece(u32::MAX)));
    assert_eq!(read(&piece(0, 0), 64), Err(StreamError::Piece(0)));
    assert_eq!(read(&piece(u64::MAX - 3, 8), 64), Err(StreamError::Order(u64::MAX - 3)));
    let other = [b"GPUMSTAT".as_slice(), &[0; 64]].concat();
    assert_eq!(read(&other, 8), Err(StreamError::Magic));
    assert_eq!(read(&[MAGIC.as_slice(), &[9, 0, 0, 0], &[0; 64]].concat(), 8), Err(StreamError::Format(9)));
}

proptest! {
    #[test]
    fn junk_is_refused(bytes in prop::collection::vec(any::<u8>(), 0..400), part in 1usize..50, magic: bool) {
        let bytes = if magic { [MAGIC.as_slice(), &FORMAT.to_le_bytes(), &bytes].concat() } else { bytes };
        prop_assert!(read(&bytes, part).is_err());
    }
}
