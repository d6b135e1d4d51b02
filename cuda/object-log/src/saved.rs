//! A worker's state, encoded as the words of a file.

use std::sync::Arc;

use foldhash::HashMap;

/// First word of the state: "objlog" and the version of the format.
const MAGIC: u64 = 0x0001_676f_6c6a_626f;
/// Number of words of a step that precede the words of its message.
const STEP_WORDS: usize = 4;
/// Image index of a step without an image.
const NO_IMAGE: u64 = u64::MAX;

/// A module image in a saved state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Image {
    /// The image's bytes as words. The last word is padded with zeros.
    pub words: Vec<u64>,
    /// Size of the image in bytes.
    pub bytes: usize,
}

impl Image {
    /// Returns the image's bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes: Vec<u8> = self.words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.truncate(self.bytes);
        bytes
    }
}

/// Kind of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepKind {
    /// Executes a message.
    Message,
    /// Executes a message that returns an existing object.
    Again,
    /// Allocates memory. The words are its address and its size in bytes. The file contains its contents.
    Memory,
    /// Writes a variable of a module or library. The words are the handle, the variable's size in bytes, the length of
    /// its name in bytes, and the name. The file contains its contents.
    Variable,
    /// Output of kernels that the guest has not taken. The words are its size in bytes and the bytes.
    Output,
}

/// One step of a replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Kind of the step.
    pub kind: StepKind,
    /// Operation number of the message.
    pub op: u16,
    /// Second word of the message (the route).
    pub route: u64,
    /// Remaining words of the message.
    pub words: Vec<u64>,
    /// Image that the message uses.
    pub image: Option<Arc<Image>>,
}

/// A blob in the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedBlob {
    /// Identifier of the blob in messages.
    pub id: u32,
    /// Kind of the blob, as a number.
    pub kind: u32,
    /// Serial number of the blob.
    pub serial: u32,
    /// Offset in the window, in bytes.
    pub offset: u64,
    /// Size in bytes.
    pub bytes: u64,
}

/// Saved state of a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SavedState {
    /// The program's process ID in the guest.
    pub process: u32,
    /// Read position in the ring.
    pub tail: u64,
    /// Number of the guest's host functions that have run.
    pub callbacks: u64,
    /// Address for the next reservation without a requested address.
    pub next_reservation: u64,
    /// The image that is being received in parts.
    pub image: Image,
    /// Number of replies in each slot that has any.
    pub replies: Vec<(u16, u64)>,
    /// All blobs.
    pub blobs: Vec<SavedBlob>,
    /// The steps, in order.
    pub steps: Vec<Step>,
}

/// Error returned if the words are not a worker state of this version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the file has no state of a worker of this version")]
pub struct Malformed;

struct Reader<'a>(&'a [u64]);

impl<'a> Reader<'a> {
    fn word(&mut self) -> Result<u64, Malformed> {
        let (first, rest) = self.0.split_first().ok_or(Malformed)?;
        self.0 = rest;
        Ok(*first)
    }

    fn short<T: TryFrom<u64>>(&mut self) -> Result<T, Malformed> {
        T::try_from(self.word()?).map_err(|_| Malformed)
    }

    fn words(&mut self, count: usize) -> Result<&'a [u64], Malformed> {
        let (words, rest) = self.0.split_at_checked(count).ok_or(Malformed)?;
        self.0 = rest;
        Ok(words)
    }

    /// Reads the length of a list whose elements have at least `words` words.
    fn count(&mut self, words: usize) -> Result<usize, Malformed> {
        let count: usize = self.short()?;
        if count > self.0.len() / words { Err(Malformed) } else { Ok(count) }
    }

    fn image(&mut self) -> Result<Image, Malformed> {
        let bytes: usize = self.short()?;
        let count = self.count(1)?;
        let words = self.words(count)?.to_vec();
        // The image may be text, which must be NUL-terminated.
        let fits = bytes <= words.len().saturating_sub(1) * 8 && words.last().is_none_or(|last| *last == 0);
        if fits { Ok(Image { words, bytes }) } else { Err(Malformed) }
    }
}

fn push_image(words: &mut Vec<u64>, image: &Image) {
    words.extend([image.bytes as u64, image.words.len() as u64]);
    words.extend(&image.words);
}

impl SavedState {
    /// Encodes the state.
    pub fn encode(&self) -> Vec<u64> {
        let mut words = vec![MAGIC, self.process.into(), self.tail, self.callbacks, self.next_reservation];
        push_image(&mut words, &self.image);
        words.push(self.replies.len() as u64);
        words.extend(self.replies.iter().flat_map(|(slot, count)| [u64::from(*slot), *count]));
        words.push(self.blobs.len() as u64);
        for blob in &self.blobs {
            words.extend([blob.id.into(), blob.kind.into(), blob.serial.into(), blob.offset, blob.bytes]);
        }
        let mut images: Vec<&Arc<Image>> = Vec::new();
        let (mut numbers, mut known) = (Vec::new(), HashMap::default());
        for step in &self.steps {
            numbers.push(step.image.as_ref().map_or(NO_IMAGE, |image| {
                *known.entry(Arc::as_ptr(image)).or_insert_with(|| {
                    images.push(image);
                    images.len() as u64 - 1
                })
            }));
        }
        words.push(images.len() as u64);
        images.into_iter().for_each(|image| push_image(&mut words, image));
        words.push(self.steps.len() as u64);
        for (step, image) in self.steps.iter().zip(numbers) {
            let kind = match step.kind {
                StepKind::Message => 0,
                StepKind::Memory => 1,
                StepKind::Again => 2,
                StepKind::Variable => 3,
                StepKind::Output => 4,
            };
            let count = step.words.len() as u64;
            words.extend([u64::from(step.op) | kind << 16, step.route, image, count]);
            words.extend(&step.words);
        }
        words
    }

    /// Decodes a state.
    ///
    /// # Errors
    /// Returns an error if the words are not a state.
    pub fn decode(words: &[u64]) -> Result<Self, Malformed> {
        let mut reader = Reader(words);
        if reader.word()? != MAGIC {
            return Err(Malformed);
        }
        let process = reader.short()?;
        let (tail, callbacks, next_reservation) = (reader.word()?, reader.word()?, reader.word()?);
        let image = reader.image()?;
        let count = reader.count(2)?;
        let replies = (0..count).map(|_| Ok((reader.short()?, reader.word()?))).collect::<Result<_, _>>()?;
        let count = reader.count(5)?;
        let blob = |_| {
            let (id, kind, serial) = (reader.short()?, reader.short()?, reader.short()?);
            Ok(SavedBlob { id, kind, serial, offset: reader.word()?, bytes: reader.word()? })
        };
        let blobs = (0..count).map(blob).collect::<Result<_, _>>()?;
        let count = reader.count(2)?;
        let images = (0..count).map(|_| reader.image().map(Arc::new)).collect::<Result<Vec<_>, _>>()?;
        let count = reader.count(STEP_WORDS)?;
        let mut steps = Vec::new();
        for _ in 0..count {
            let first = reader.word()?;
            let (route, image) = (reader.word()?, reader.word()?);
            let kind = match first >> 16 {
                0 => StepKind::Message,
                1 => StepKind::Memory,
                2 => StepKind::Again,
                3 => StepKind::Variable,
                4 => StepKind::Output,
                _ => return Err(Malformed),
            };
            let image = match image {
                NO_IMAGE => None,
                number => Some(usize::try_from(number).ok().and_then(|at| images.get(at)).ok_or(Malformed)?.clone()),
            };
            let count = reader.count(1)?;
            steps.push(Step { kind, op: first as u16, route, words: reader.words(count)?.to_vec(), image });
        }
        if !reader.0.is_empty() {
            return Err(Malformed);
        }
        Ok(Self { process, tail, callbacks, next_reservation, image, replies, blobs, steps })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn state() -> SavedState {
        let image = Arc::new(Image { words: vec![7, 8, 0], bytes: 13 });
        let step = |kind, op, image: Option<&Arc<Image>>, words: &[u64]| Step {
            kind,
            op,
            route: 1,
            words: words.to_vec(),
            image: image.cloned(),
        };
        SavedState {
            process: 77,
            tail: 4096,
            callbacks: 3,
            next_reservation: 1 << 45,
            image: Image { words: vec![1, 0], bytes: 8 },
            replies: vec![(0, 5), (1023, 9)],
            blobs: vec![SavedBlob { id: 1, kind: 1, serial: 0, offset: 0, bytes: 65536 }],
            steps: vec![
                step(StepKind::Message, 1, Some(&image), &[1, 2]),
                step(StepKind::Memory, 0, None, &[1 << 45, 512]),
                step(StepKind::Again, 2, Some(&image), &[]),
                step(StepKind::Variable, 0, None, &[7, 8, 1, 0x61]),
                step(StepKind::Output, 0, None, &[2, 0x6261]),
            ],
        }
    }

    #[test]
    fn state_decodes_to_itself_and_shares_its_images() {
        let found = SavedState::decode(&state().encode()).expect("a state");
        assert_eq!(found, state());
        let images: Vec<_> = found.steps.iter().filter_map(|step| step.image.as_ref()).collect();
        assert!(Arc::ptr_eq(images[0], images[1]));
        assert_eq!(SavedState::decode(&SavedState::default().encode()), Ok(SavedState::default()));
    }

    #[test]
    fn part_of_a_state_and_a_longer_one_are_malformed() {
        let words = state().encode();
        for length in 0..words.len() {
            assert_eq!(SavedState::decode(&words[..length]), Err(Malformed), "{length} words");
        }
        let longer = [&words[..], &[0]].concat();
        assert_eq!(SavedState::decode(&longer), Err(Malformed));
    }

    #[test]
    fn text_of_an_image_must_end_within_it() {
        let mut wrong = state();
        wrong.image = Image { words: vec![u64::MAX], bytes: 8 };
        assert_eq!(SavedState::decode(&wrong.encode()), Err(Malformed));
        wrong.image = Image { words: vec![1, 0], bytes: 9 };
        assert_eq!(SavedState::decode(&wrong.encode()), Err(Malformed));
    }

    proptest! {
        #[test]
        fn changed_words_neither_panic_nor_allocate_much(
            at in 0usize..60, value in prop_oneof![any::<u64>(), 0u64..9, Just(u64::MAX)]
        ) {
            let mut words = state().encode();
            let at = at % words.len();
            words[at] = value;
            // No list is longer than the input.
            if let Ok(found) = SavedState::decode(&words) {
                prop_assert!(found.steps.len() + found.blobs.len() + found.replies.len() <= words.len());
            }
        }
    }
}
