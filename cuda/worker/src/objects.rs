//! Maps the guest's handles to the driver's objects, and records the addresses that a guest may use.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use cuda_calls::{Fault, Handles, Kind, Numbered, index_of, kind_of};
use cuda_ring::{ADDRESSES, PINNED_ADDRESSES};

use crate::driver::{INVALID_HANDLE, INVALID_VALUE};

/// Maximum number of objects of one program.
const MAX_OBJECTS: usize = 1 << 20;
/// Maximum number of device memory ranges outside the shared address range.
const MAX_RANGES: usize = 1 << 18;

/// An object, or the error from its creation.
#[derive(Clone, Copy, Debug)]
struct Object {
    value: Result<u64, i32>,
    context: u32,
    /// Number of calls that returned the object, minus the number of calls that destroyed it.
    references: u32,
    /// Handle of the object that owns this object and is destroyed with it, or 0 without an owner.
    owner: u64,
}

/// A range of addresses.
#[derive(Clone, Copy, Debug)]
struct Range {
    bytes: u64,
    /// Number of the context that owns the memory, or 0 for pinned memory and reservations, which do not belong to a
    /// context.
    context: u32,
}

/// All objects of a program.
#[derive(Debug, Default)]
pub struct Objects {
    objects: HashMap<u64, Object, foldhash::fast::FixedState>,
    /// Handles of objects that were returned by calls with a reply.
    handles: HashMap<(Kind, u64), u64, foldhash::fast::FixedState>,
    /// Handles of the objects that an object owns, and that are destroyed with it.
    owned: HashMap<u64, BTreeSet<u64>, foldhash::fast::FixedState>,
    /// Objects that the driver identifies by a number. The value is the number of existing objects with that number,
    /// because several contexts may use the same number.
    numbers: HashMap<(Numbered, u64), u32, foldhash::fast::FixedState>,
    /// Device memory outside the shared address range, keyed by first address.
    ranges: BTreeMap<u64, Range>,
    /// Pinned memory of the program, keyed by first address.
    pinned: BTreeMap<u64, Range>,
    /// Image that is being received in parts, padded with zeros.
    pub image: Vec<u64>,
    /// Number of image bytes received so far.
    pub image_bytes: usize,
}

/// The program has too many objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooMany;

fn within(ranges: &BTreeMap<u64, Range>, address: u64, bytes: u64) -> bool {
    let (Some((start, range)), Some(end)) = (ranges.range(..=address).next_back(), address.checked_add(bytes)) else {
        return false;
    };
    address - start < range.bytes && end <= start + range.bytes
}

impl Objects {
    /// Records an object, or the error from its creation.
    ///
    /// # Errors
    /// Returns an error if the program has too many objects.
    pub fn insert(&mut self, handle: u64, value: Result<u64, i32>, context: u32) -> Result<(), TooMany> {
        if self.objects.len() >= MAX_OBJECTS {
            return Err(TooMany);
        }
        self.objects.insert(handle, Object { value, context, references: 1, owner: 0 });
        Ok(())
    }

    /// Records an object that a call has returned, under its existing handle or else under `handle`. Returns the
    /// handle. An object with an owner is removed with the owner.
    ///
    /// # Errors
    /// Returns an error if the program has too many objects.
    pub fn insert_or_find(
        &mut self,
        kind: Kind,
        handle: u64,
        value: u64,
        context: u32,
        owner: Option<u64>,
    ) -> Result<u64, TooMany> {
        if self.handles.len() >= 2 * MAX_OBJECTS {
            return Err(TooMany);
        }
        // The driver may return an object that was released but still exists because it is mapped.
        let known = *self.handles.entry((kind, value)).or_insert(handle);
        match self.objects.get_mut(&known) {
            Some(object) => object.references = object.references.saturating_add(1),
            None => {
                self.insert(known, Ok(value), context)?;
                if let (Some(owner), Some(object)) = (owner, self.objects.get_mut(&known)) {
                    object.owner = owner;
                    self.owned.entry(owner).or_default().insert(known);
                }
            }
        }
        Ok(known)
    }

    /// Removes a reference to an object. If it was the last one, removes the object and the objects that it owns, and
    /// returns their handles. Removing a context also removes its memory ranges, because the driver releases the
    /// addresses and the worker may reuse them for its own memory.
    pub fn remove(&mut self, handle: u64) -> Vec<u64> {
        let Some(object) = self.objects.get_mut(&handle) else { return Vec::new() };
        object.references -= 1;
        if object.references > 0 {
            return Vec::new();
        }
        let owner = object.owner;
        self.objects.remove(&handle);
        if let Some(owned) = self.owned.get_mut(&owner) {
            owned.remove(&handle);
        }
        if let Some(context) = index_of(Kind::Context, handle) {
            self.ranges.retain(|_, range| range.context != context);
        }
        let mut ended = vec![handle];
        let mut at = 0;
        while let Some(owner) = ended.get(at).copied() {
            at += 1;
            for owned in self.owned.remove(&owner).unwrap_or_default() {
                // The driver may reuse the object's address for another object, which needs its own handle.
                if let (Some(object), Some(kind)) = (self.objects.remove(&owned), kind_of(owned))
                    && let Ok(value) = object.value
                {
                    self.handles.remove(&(kind, value));
                }
                ended.push(owned);
            }
        }
        ended
    }

    /// Records an object that the driver identifies by a number.
    ///
    /// # Errors
    /// Returns an error if the program has too many objects.
    pub fn add_number(&mut self, kind: Numbered, number: u64) -> Result<(), TooMany> {
        if self.numbers.len() >= MAX_OBJECTS {
            return Err(TooMany);
        }
        *self.numbers.entry((kind, number)).or_default() += 1;
        Ok(())
    }

    /// Removes an object that the driver identifies by a number.
    pub fn remove_number(&mut self, kind: Numbered, number: u64) {
        if let Some(count) = self.numbers.get_mut(&(kind, number)) {
            *count -= 1;
            if *count == 0 {
                self.numbers.remove(&(kind, number));
            }
        }
    }

    /// Returns the driver's handles for a context's streams.
    pub fn streams_of(&self, context: u32) -> Vec<u64> {
        let of = |(handle, object): (&u64, &Object)| {
            (kind_of(*handle) == Some(Kind::Stream) && object.context == context).then(|| object.value.ok()).flatten()
        };
        self.objects.iter().filter_map(of).collect()
    }

    /// Returns the numbers of all contexts.
    pub fn contexts(&self) -> Vec<u32> {
        self.objects.keys().filter_map(|handle| index_of(Kind::Context, *handle)).collect()
    }

    /// Records a context's device memory outside the shared address range.
    ///
    /// # Errors
    /// Returns an error if the program has too many ranges.
    pub fn add_range(&mut self, address: u64, bytes: u64, context: u32) -> Result<(), TooMany> {
        if ADDRESSES.contains(&address) || address == 0 {
            return Ok(());
        }
        if self.ranges.len() >= MAX_RANGES {
            return Err(TooMany);
        }
        self.ranges.insert(address, Range { bytes: bytes.max(1), context });
        Ok(())
    }

    /// Removes a range.
    pub fn remove_range(&mut self, address: u64) {
        self.ranges.remove(&address);
    }

    /// Records pinned memory that the worker has mapped.
    pub fn add_pinned(&mut self, address: u64, bytes: u64) {
        self.pinned.insert(address, Range { bytes, context: 0 });
    }

    /// Removes pinned memory.
    pub fn remove_pinned(&mut self, address: u64) {
        self.pinned.remove(&address);
    }
}

impl Handles for Objects {
    fn find(&self, kind: Kind, handle: u64) -> Result<u64, Fault> {
        if kind == Kind::Stream && handle <= 2 {
            return Ok(handle);
        }
        index_of(kind, handle).ok_or(Fault::Malformed)?;
        match self.objects.get(&handle) {
            Some(Object { value: Ok(value), .. }) => Ok(*value),
            Some(Object { value: Err(code), .. }) => Err(Fault::Refused(*code)),
            // The driver returns this error for unknown memory handles.
            None if kind == Kind::Memory => Err(Fault::Refused(INVALID_VALUE)),
            None => Err(Fault::Refused(INVALID_HANDLE)),
        }
    }

    fn is_free(&self, kind: Kind, handle: u64) -> bool {
        index_of(kind, handle).is_some() && !self.objects.contains_key(&handle)
    }

    fn has_range(&self, address: u64, bytes: u64) -> bool {
        let Some(end) = address.checked_add(bytes) else { return false };
        if (ADDRESSES.start..PINNED_ADDRESSES).contains(&address) {
            return end <= PINNED_ADDRESSES;
        }
        within(&self.pinned, address, bytes) || within(&self.ranges, address, bytes)
    }

    fn image(&self) -> u64 {
        self.image.as_ptr().addr() as u64
    }

    fn image_bytes(&self) -> u64 {
        self.image_bytes as u64
    }

    fn has_number(&self, kind: Numbered, number: u64) -> bool {
        self.numbers.contains_key(&(kind, number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda_calls::handle;

    #[test]
    fn only_addresses_of_card_and_guest_are_accepted() {
        let mut objects = Objects::default();
        objects.add_range(0x7f00_0000_0000, 100, 1).expect("room");
        objects.add_pinned(PINNED_ADDRESSES + 4096, 4096);
        assert!(objects.has_range(ADDRESSES.start, 1 << 40));
        assert!(objects.has_range(0x7f00_0000_0010, 84));
        assert!(objects.has_range(PINNED_ADDRESSES + 4096, 4096));
        for (address, bytes) in [
            (0x7f00_0000_0010, 85),
            (PINNED_ADDRESSES + 4096, 4097),
            (PINNED_ADDRESSES, 1),
            (PINNED_ADDRESSES - 1, 2),
            (u64::MAX, 2),
            (0x1000, 1),
            (objects.image(), 8),
        ] {
            assert!(!objects.has_range(address, bytes), "{address:#x} {bytes}");
        }
    }

    #[test]
    fn memory_outside_the_shared_addresses_ends_with_its_context() {
        let mut objects = Objects::default();
        let contexts = [1, 2].map(|number| handle(Kind::Context, number));
        for (number, context) in (1..).zip(contexts) {
            objects.insert_or_find(Kind::Context, context, u64::from(number), number, None).expect("room");
            objects.add_range(0x7f00_0000_0000 * u64::from(number), 100, number).expect("room");
        }
        objects.insert_or_find(Kind::Context, contexts[0], 1, 1, None).expect("room");
        objects.remove(contexts[0]);
        assert!(objects.has_range(0x7f00_0000_0000, 100), "one of two references is left");
        objects.remove(contexts[0]);
        assert!(!objects.has_range(0x7f00_0000_0000, 1));
        assert!(objects.has_range(2 * 0x7f00_0000_0000, 100));
    }

    #[test]
    fn object_that_failed_keeps_its_error() {
        let mut objects = Objects::default();
        let stream = handle(Kind::Stream, 1);
        assert!(objects.is_free(Kind::Stream, stream));
        objects.insert(stream, Err(2), 0).expect("room");
        assert_eq!(objects.find(Kind::Stream, stream), Err(Fault::Refused(2)));
        assert_eq!(objects.find(Kind::Event, stream), Err(Fault::Malformed));
        assert_eq!(objects.find(Kind::Event, handle(Kind::Event, 1)), Err(Fault::Refused(400)));
        assert!(!objects.is_free(Kind::Stream, stream));
    }

    #[test]
    fn functions_end_with_their_module_and_leave_no_handle() {
        let mut objects = Objects::default();
        let [module, kernel, function] = [Kind::Module, Kind::Function, Kind::Function].map(|kind| handle(kind, 1));
        let (kernel, function) = (kernel, function + 16);
        objects.insert_or_find(Kind::Module, module, 0x10, 1, None).expect("room");
        objects.insert_or_find(Kind::Function, kernel, 0x20, 1, Some(module)).expect("room");
        objects.insert_or_find(Kind::Function, function, 0x30, 1, Some(kernel)).expect("room");
        let again = objects.insert_or_find(Kind::Function, function + 16, 0x20, 1, Some(module));
        assert_eq!(again, Ok(kernel), "the same object");
        assert_eq!(objects.remove(module), [module, kernel, function]);
        assert_eq!(objects.find(Kind::Function, kernel), Err(Fault::Refused(400)));
        let other = objects.insert_or_find(Kind::Function, function + 32, 0x20, 1, None);
        assert_eq!(other, Ok(function + 32), "another object at the same place");
    }

    #[test]
    fn numbers_are_known_until_their_last_object_ends() {
        let mut objects = Objects::default();
        for _ in 0..2 {
            objects.add_number(Numbered::Texture, 1).expect("room");
        }
        assert!(!objects.has_number(Numbered::Surface, 1));
        objects.remove_number(Numbered::Texture, 1);
        assert!(objects.has_number(Numbered::Texture, 1));
        objects.remove_number(Numbered::Texture, 1);
        objects.remove_number(Numbered::Texture, 1);
        assert!(!objects.has_number(Numbered::Texture, 1));
    }
}
