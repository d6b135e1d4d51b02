use loona_hpack::{Decoder, Encoder};
use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

type Headers = Vec<(Vec<u8>, Vec<u8>)>;

const PREFACE_BYTES: &[u8; PREFACE_LEN] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let [.., l2, l1, l0] = payload.len().to_be_bytes();
    [&[l2, l1, l0, kind, flags, 0, 0, 0, stream], payload].concat()
}

fn headers(pairs: &[(&str, &str)]) -> Headers {
    pairs.iter().map(|(name, value)| (name.as_bytes().to_vec(), value.as_bytes().to_vec())).collect()
}

/// Returns a request as sent by Go's gRPC.
fn request(authority: &str) -> Headers {
    headers(&[
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/pluginregistration.Registration/GetInfo"),
        (":authority", authority),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ])
}

fn encode(encoder: &mut Encoder<'_>, headers: &Headers) -> Vec<u8> {
    encoder.encode(headers.iter().map(|(name, value)| (&name[..], &value[..])))
}

/// Returns the output for `input`, which is passed in chunks of `piece` bytes.
fn rewritten(input: &[u8], piece: usize) -> Result<Vec<u8>, Malformed> {
    let (mut rewriter, mut out) = (Rewriter::default(), Vec::new());
    input.chunks(piece.max(1)).try_for_each(|piece| rewriter.take(piece, &mut out))?;
    Ok(out)
}

/// Returns the frames after the preface, as (kind, flags, stream, payload).
fn frames(bytes: &[u8]) -> Vec<(u8, u8, u8, Vec<u8>)> {
    let mut rest = bytes.strip_prefix(PREFACE_BYTES).expect("the preface passes");
    let mut frames = Vec::new();
    while let [l2, l1, l0, kind, flags, _, _, _, stream, after @ ..] = rest {
        let len = usize::from(*l2) << 16 | usize::from(*l1) << 8 | usize::from(*l0);
        assert!(len <= MAX_FRAME);
        frames.push((*kind, *flags, *stream, after[..len].to_vec()));
        rest = &after[len..];
    }
    assert!(rest.is_empty());
    frames
}

#[test]
fn authority_is_rewritten_to_localhost_in_every_block() {
    let mut encoder = Encoder::new();
    let mut input = PREFACE_BYTES.to_vec();
    input.extend(frame(4, 0, 0, &[]));
    for (stream, authority) in [(1, "/var/lib/kubelet/x.sock"), (3, "/var/lib/kubelet/x.sock"), (5, "%2Fvar%2Fx.sock")]
    {
        // The second request refers to the encoder's table, so its bytes do not contain the path.
        input.extend(frame(HEADERS, END_HEADERS, stream, &encode(&mut encoder, &request(authority))));
        input.extend(frame(0, END_STREAM, stream, &[0, 0, 0, 0, 0]));
    }
    for piece in [1, 2, 7, 4096] {
        let out = frames(&rewritten(&input, piece).unwrap());
        assert_eq!(out.iter().map(|frame| frame.0).collect::<Vec<_>>(), [4, 1, 0, 1, 0, 1, 0]);
        for (kind, flags, _, payload) in &out {
            if *kind == HEADERS {
                // Use a new decoder, because no block may depend on an earlier block.
                assert_eq!(Decoder::new().decode(payload).unwrap(), request("localhost"));
                assert_eq!(*flags, END_HEADERS);
            } else if *kind == 0 {
                assert_eq!((*flags, payload.as_slice()), (END_STREAM, [0; 5].as_slice()));
            }
        }
    }
}

#[test]
fn split_padded_header_blocks_are_joined() {
    let block = encode(&mut Encoder::new(), &request("/x"));
    let (first, second) = block.split_at(block.len() / 2);
    let padded = [&[3, 0, 0, 0, 0, 16], first, &[0; 3]].concat();
    let mut input = PREFACE_BYTES.to_vec();
    input.extend(frame(HEADERS, END_STREAM | PADDED | PRIORITY, 1, &padded));
    input.extend(frame(CONTINUATION, 0, 1, &[]));
    input.extend(frame(CONTINUATION, END_HEADERS, 1, second));
    let out = frames(&rewritten(&input, 5).unwrap());
    let [(HEADERS, flags, 1, payload)] = out.as_slice() else { panic!("{out:?}") };
    assert_eq!(*flags, END_STREAM | END_HEADERS);
    assert_eq!(Decoder::new().decode(payload).unwrap(), request("localhost"));
}

#[test]
fn long_headers_are_divided_again() {
    let long = [request("/x"), headers(&[("a", &"v".repeat(40_000))])].concat();
    let block = encode(&mut Encoder::new(), &long);
    let mut input = PREFACE_BYTES.to_vec();
    let parts: Vec<_> = block.chunks(9_000).collect();
    for (index, part) in parts.iter().enumerate() {
        let kind = if index == 0 { HEADERS } else { CONTINUATION };
        let flags = if index + 1 == parts.len() { END_HEADERS } else { 0 };
        input.extend(frame(kind, flags, 7, part));
    }
    let out = frames(&rewritten(&input, 4096).unwrap());
    assert_eq!(
        out.iter().map(|frame| (frame.0, frame.1, frame.2)).collect::<Vec<_>>(),
        [(1, 0, 7), (9, 0, 7), (9, 4, 7)]
    );
    let block: Vec<u8> = out.into_iter().flat_map(|frame| frame.3).collect();
    assert_eq!(Decoder::new().decode(&block).unwrap()[6].1.len(), 40_000);
}

#[test]
fn malformed_frames_end_connection() {
    let block = encode(&mut Encoder::new(), &request("/x"));
    let after = |bytes: Vec<u8>| rewritten(&[PREFACE_BYTES.to_vec(), bytes].concat(), 4096).unwrap_err();
    assert_eq!(after(frame(0, 0, 1, &[0; MAX_FRAME + 1])), Malformed::Frame(MAX_FRAME + 1));
    assert_eq!(after(frame(CONTINUATION, 0, 1, &[])), Malformed::Order(CONTINUATION, "is none"));
    let open = frame(HEADERS, 0, 1, &block);
    assert_eq!(after([open.clone(), frame(0, 0, 1, &[])].concat()), Malformed::Order(0, "goes on"));
    // A block that continues in another stream would count as part of that stream.
    assert_eq!(after([open, frame(CONTINUATION, END_HEADERS, 3, &[])].concat()), Malformed::Order(9, "goes on"));
    assert_eq!(after(frame(HEADERS, PADDED | END_HEADERS, 1, &[2, 0])), Malformed::Padding);
    assert_eq!(after(frame(HEADERS, PRIORITY | END_HEADERS, 1, &[0; 4])), Malformed::Padding);
    assert_eq!(after(frame(HEADERS, END_HEADERS, 1, &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff])), Malformed::Compression);
    // The client announces a table of 8 KiB, which is twice the size that the server permits.
    assert_eq!(after(frame(HEADERS, END_HEADERS, 1, &[0x3f, 0xe1, 0x3f, 0x82])), Malformed::Compression);
}

#[test]
fn oversized_header_block_is_rejected() {
    let mut input = PREFACE_BYTES.to_vec();
    // Add about 3900 bytes to the table, and then refer to them with a single byte.
    let mut block = encode(&mut Encoder::new(), &headers(&[("a", &"v".repeat(3900))]));
    block.extend([0xbe; 1000]);
    input.extend(frame(HEADERS, END_HEADERS, 1, &block));
    assert_eq!(rewritten(&input, 4096).unwrap_err(), Malformed::Block);
    // An endless header block also exceeds the limit.
    let mut input = [PREFACE_BYTES.to_vec(), frame(HEADERS, 0, 1, &[0x82; 16_000])].concat();
    (0..8).for_each(|_| input.extend(frame(CONTINUATION, 0, 1, &[0x82; 16_000])));
    assert_eq!(rewritten(&input, 4096).unwrap_err(), Malformed::Block);
}

proptest! {
    #[test]
    fn junk_is_taken_or_refused(junk in vec(any::<u8>(), 0..400), piece in 1..50_usize, kind in 0..11_u8, flags: u8) {
        let _ = rewritten(&junk, piece);
        let input = [PREFACE_BYTES.to_vec(), frame(kind, flags, 1, &junk)].concat();
        if let Ok(out) = rewritten(&input, piece) {
            prop_assert!(out.len() <= PREFACE_LEN + 2 * MAX_BLOCK);
        }
    }

    #[test]
    fn headers_are_the_same_but_for_the_authority(
        lists in vec(vec(("[a-z]{1,8}", "[ -~]{0,40}"), 0..8), 1..6),
        authority in "[!-~]{1,30}",
        piece in 1..40_usize,
    ) {
        let mut encoder = Encoder::new();
        let mut input = PREFACE_BYTES.to_vec();
        let lists: Vec<Headers> = lists
            .into_iter()
            .map(|list| list.into_iter().map(|(name, value)| (name.into_bytes(), value.into_bytes())).collect())
            .collect();
        for list in &lists {
            let list = [request(&authority), list.clone()].concat();
            input.extend(frame(HEADERS, END_HEADERS, 1, &encode(&mut encoder, &list)));
        }
        let out = frames(&rewritten(&input, piece).unwrap());
        prop_assert_eq!(out.len(), lists.len());
        for ((.., payload), list) in out.iter().zip(lists) {
            prop_assert_eq!(Decoder::new().decode(payload).unwrap(), [request("localhost"), list].concat());
        }
    }
}
