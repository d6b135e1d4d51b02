//! Rewrites the `:authority` of requests, because the `h2` crate rejects the values sent by kubelets.
//!
//! When a plugin registers, the kubelet dials the plugin's socket by its path. Kubelets before 1.34 dial a DRA driver
//! in the same way. Go's gRPC then sends the path as `:authority`, either unchanged (`/var/lib/kubelet/x.sock`) or, in
//! newer versions, escaped (`%2Fvar%2Flib%2Fkubelet%2Fx.sock`). The `h2` crate accepts neither form as an authority: it
//! resets the stream, and has no option to change this behaviour (hyperium/h2#487). The authority has no meaning on a
//! UNIX socket, so this module replaces it with `localhost`.
//!
//! Header blocks are compressed with a table that grows from block to block, so they cannot be edited in place. The
//! [`Rewriter`] therefore undoes the compression: it maintains the client's table, decodes each block, and encodes it
//! again as literals without table references. Frames of all other kinds pass unchanged.
//!
//! The module does not check that the headers are complete and in order, because `h2` does so.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use loona_hpack::Decoder;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;

/// Length of a client's connection preface, in bytes.
const PREFACE_LEN: usize = 24;
/// Size of a frame's header in bytes.
const HEAD: usize = 9;
/// Maximum size of a frame's payload in bytes. The server does not change the initial limit.
const MAX_FRAME: usize = 16 << 10;
/// Maximum size of a header block and of its decoded headers, in bytes.
const MAX_BLOCK: usize = 64 << 10;
/// Maximum size of the client's header table in bytes. The server does not change the initial limit.
const TABLE: usize = 4096;
/// Overhead counted for each header in addition to its name and value (RFC 9113), in bytes.
const OVERHEAD: usize = 32;

const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 0x1;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

/// A client's protocol error that makes the rest of its connection unreadable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// A frame is too long.
    #[error("a frame of {0} bytes, expected at most {MAX_FRAME}")]
    Frame(usize),
    /// A frame interrupts a header block, or continues a header block that has not begun.
    #[error("a frame of kind {0} where a header block {1}")]
    Order(u8, &'static str),
    /// A frame's padding is longer than the frame.
    #[error("padding that is longer than its frame")]
    Padding,
    /// A header block is too long, or decodes to too many bytes.
    #[error("headers of more than {MAX_BLOCK} bytes")]
    Block,
    /// A header block cannot be decoded.
    #[error("a header block that cannot be decoded")]
    Compression,
}

impl From<Malformed> for io::Error {
    fn from(error: Malformed) -> Self {
        Self::new(io::ErrorKind::InvalidData, error)
    }
}

/// The frame that is being read.
#[derive(Clone, Copy, Debug)]
struct Frame {
    kind: u8,
    flags: u8,
    stream: [u8; 4],
    left: usize,
}

/// An incomplete header block.
#[derive(Debug)]
struct Block {
    stream: [u8; 4],
    ends_stream: bool,
    bytes: Vec<u8>,
}

/// A state machine that converts a client's bytes to bytes for `h2`.
pub struct Rewriter {
    preface_left: usize,
    head: Vec<u8>,
    frame: Option<Frame>,
    /// The received part of the payload of a HEADERS or CONTINUATION frame.
    payload: Vec<u8>,
    block: Option<Block>,
    decoder: Decoder<'static>,
}

impl std::fmt::Debug for Rewriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rewriter").field("frame", &self.frame).field("block", &self.block).finish_non_exhaustive()
    }
}

impl Default for Rewriter {
    fn default() -> Self {
        let mut decoder = Decoder::new();
        decoder.set_max_allowed_table_size(TABLE);
        Self { preface_left: PREFACE_LEN, head: Vec::new(), frame: None, payload: Vec::new(), block: None, decoder }
    }
}

impl Rewriter {
    /// Accepts bytes from the client, and appends the resulting bytes to `out`.
    ///
    /// # Errors
    /// Returns an error if the rest of the connection cannot be decoded.
    pub fn take(&mut self, mut bytes: &[u8], out: &mut Vec<u8>) -> Result<(), Malformed> {
        out.extend_from_slice(cut(&mut bytes, &mut self.preface_left));
        while !bytes.is_empty() {
            let Some(frame) = &mut self.frame else {
                let mut left = HEAD - self.head.len();
                self.head.extend_from_slice(cut(&mut bytes, &mut left));
                if left == 0 {
                    self.begin(out)?;
                }
                continue;
            };
            let part = cut(&mut bytes, &mut frame.left);
            let kept = if carries_headers(frame.kind) { &mut self.payload } else { &mut *out };
            kept.extend_from_slice(part);
            self.end_if_whole(out)?;
        }
        Ok(())
    }

    /// Begins a frame after its header has been received.
    fn begin(&mut self, out: &mut Vec<u8>) -> Result<(), Malformed> {
        let &[l2, l1, l0, kind, flags, s3, s2, s1, s0] = self.head.as_slice() else { return Ok(()) };
        let left = usize::from(l2) << 16 | usize::from(l1) << 8 | usize::from(l0);
        if left > MAX_FRAME {
            return Err(Malformed::Frame(left));
        }
        match (&self.block, kind) {
            (None, CONTINUATION) => return Err(Malformed::Order(kind, "is none")),
            (Some(block), _) if kind != CONTINUATION || block.stream != [s3, s2, s1, s0] => {
                return Err(Malformed::Order(kind, "goes on"));
            }
            _ => {}
        }
        if !carries_headers(kind) {
            out.extend_from_slice(&self.head);
        }
        self.head.clear();
        self.frame = Some(Frame { kind, flags, stream: [s3, s2, s1, s0], left });
        self.end_if_whole(out)
    }

    /// Ends the frame if it is complete.
    fn end_if_whole(&mut self, out: &mut Vec<u8>) -> Result<(), Malformed> {
        let Some(frame) = self.frame.take_if(|frame| frame.left == 0) else { return Ok(()) };
        if !carries_headers(frame.kind) {
            return Ok(());
        }
        let payload = std::mem::take(&mut self.payload);
        let part = if frame.kind == HEADERS { fragment(&payload, frame.flags)? } else { &payload };
        let ends_stream = frame.flags & END_STREAM != 0;
        let block = self.block.get_or_insert_with(|| Block { stream: frame.stream, ends_stream, bytes: Vec::new() });
        if block.bytes.len() + part.len() > MAX_BLOCK {
            return Err(Malformed::Block);
        }
        block.bytes.extend_from_slice(part);
        if frame.flags & END_HEADERS != 0 {
            let block = self.block.take();
            block.map_or(Ok(()), |block| self.rewrite(&block, out))?;
        }
        Ok(())
    }

    /// Decodes a complete header block, replaces `:authority`, and encodes the block without table references.
    fn rewrite(&mut self, block: &Block, out: &mut Vec<u8>) -> Result<(), Malformed> {
        let (mut fields, mut size) = (Vec::new(), 0_usize);
        let decoded = self.decoder.decode_with_cb(&block.bytes, |name, value| {
            size = size.saturating_add(name.len() + value.len() + OVERHEAD);
            // Headers above the limit are counted but not stored.
            if size <= MAX_BLOCK {
                let value = if *name == *b":authority" { b"localhost".as_slice() } else { &value };
                literal(&name, value, &mut fields);
            }
        });
        decoded.map_err(|_| Malformed::Compression)?;
        if size > MAX_BLOCK {
            return Err(Malformed::Block);
        }
        let parts: Vec<&[u8]> = if fields.is_empty() { vec![&[]] } else { fields.chunks(MAX_FRAME).collect() };
        for (index, part) in parts.iter().enumerate() {
            let kind = if index == 0 { HEADERS } else { CONTINUATION };
            let ends_stream = if index == 0 && block.ends_stream { END_STREAM } else { 0 };
            let ends_headers = if index + 1 == parts.len() { END_HEADERS } else { 0 };
            // Parts are not longer than a frame, so the length fits in three bytes.
            let [.., l2, l1, l0] = part.len().to_be_bytes();
            out.extend_from_slice(&[l2, l1, l0, kind, ends_stream | ends_headers]);
            out.extend_from_slice(&block.stream);
            out.extend_from_slice(part);
        }
        Ok(())
    }
}

fn carries_headers(kind: u8) -> bool {
    matches!(kind, HEADERS | CONTINUATION)
}

/// Removes and returns at most `left` bytes from the front of `bytes`, and subtracts their number from `left`.
fn cut<'a>(bytes: &mut &'a [u8], left: &mut usize) -> &'a [u8] {
    let (front, rest) = bytes.split_at((*left).min(bytes.len()));
    *left -= front.len();
    *bytes = rest;
    front
}

/// Returns the header block fragment in a frame's payload, without padding and priority.
fn fragment(payload: &[u8], flags: u8) -> Result<&[u8], Malformed> {
    let (mut rest, mut padding) = (payload, 0);
    if flags & PADDED != 0 {
        let (&length, after) = rest.split_first().ok_or(Malformed::Padding)?;
        (rest, padding) = (after, usize::from(length));
    }
    if flags & PRIORITY != 0 {
        rest = rest.get(5..).ok_or(Malformed::Padding)?;
    }
    rest.len().checked_sub(padding).and_then(|end| rest.get(..end)).ok_or(Malformed::Padding)
}

/// Writes a header as a literal that is not added to the table.
fn literal(name: &[u8], value: &[u8], out: &mut Vec<u8>) {
    out.push(0);
    for text in [name, value] {
        length(text.len(), out);
        out.extend_from_slice(text);
    }
}

/// Encodes a length with a seven-bit prefix. The eighth bit is 0, which indicates uncompressed text.
fn length(length: usize, out: &mut Vec<u8>) {
    const PREFIX: usize = 0x7f;
    if let Some(rest) = length.checked_sub(PREFIX) {
        out.push(0x7f);
        let mut rest = rest;
        while rest >= 0x80 {
            out.push((rest & 0x7f) as u8 | 0x80);
            rest >>= 7;
        }
        out.push(rest as u8);
    } else {
        out.push(length as u8);
    }
}

/// A client's connection in which every `:authority` is replaced by `localhost`.
#[derive(Debug)]
pub struct Localhost<S> {
    inner: S,
    rewriter: Rewriter,
    /// Bytes for the reader, which has already read the bytes before `given`.
    out: Vec<u8>,
    given: usize,
}

impl<S> Localhost<S> {
    /// Wraps a connection from which nothing has been read.
    pub fn new(inner: S) -> Self {
        Self { inner, rewriter: Rewriter::default(), out: Vec::new(), given: 0 }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Localhost<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            let ready = this.out.get(this.given..).unwrap_or_default();
            if !ready.is_empty() || buf.remaining() == 0 {
                let len = ready.len().min(buf.remaining());
                buf.put_slice(&ready[..len]);
                this.given += len;
                return Poll::Ready(Ok(()));
            }
            this.out.clear();
            this.given = 0;
            let mut room = [0; 4096];
            let mut read = ReadBuf::new(&mut room);
            ready!(Pin::new(&mut this.inner).poll_read(cx, &mut read))?;
            if read.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
            this.rewriter.take(read.filled(), &mut this.out)?;
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Localhost<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(cx)
    }
}

impl<S> Connected for Localhost<S> {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

#[cfg(test)]
mod tests;
