//! Queue of guest firmware images to store, so that virtual CPUs never wait for a disk.

use crate::image::Image;
use crate::store::{Store, StoreError};
use nvspec::falcon::Falcon;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

/// Maximum number of queued images. Further images are dropped, and are offered again when their falcon is restarted.
const WAITING_MAX: usize = 8;
/// Maximum number of new candidates accepted from each guest while the daemon runs.
const NEW_MAX: u32 = 8;

/// Queue of guest firmware images.
#[derive(Clone, Debug)]
pub struct Inbox(Arc<SyncSender<(u32, Image)>>);

impl Inbox {
    /// Creates a queue, and a thread that adds queued images to `store`. The thread exits when the last clone of the
    /// queue is dropped.
    ///
    /// # Errors
    /// Returns an error if the thread cannot be created.
    pub fn for_store(store: Store) -> std::io::Result<Self> {
        let (sender, receiver) = sync_channel(WAITING_MAX);
        std::thread::Builder::new().name("firmware".into()).spawn(move || record(&store, &receiver))?;
        Ok(Self(Arc::new(sender)))
    }

    /// Queues the image with which guest number `guest` has started a falcon. Drops invalid images, and images beyond
    /// the limits.
    pub fn offer(&self, guest: u32, falcon: Falcon, code: &[u32], data: &[u32]) {
        if let Ok(image) = Image::new(falcon, code, data) {
            let _dropped = self.0.try_send((guest, image));
        }
    }
}

fn record(store: &Store, images: &Receiver<(u32, Image)>) {
    let mut new: BTreeMap<u32, u32> = BTreeMap::new();
    let mut told_full = false;
    for (guest, image) in images {
        let count = new.entry(guest).or_default();
        if *count >= NEW_MAX {
            continue;
        }
        match store.add(&image) {
            Ok(false) => {}
            Ok(true) => {
                *count += 1;
                tracing::info!(guest, falcon = %image.falcon(), digest = %image.digest(), "a guest has loaded \
                    firmware, which is now a candidate (`mediatorctl card firmware list`)");
            }
            Err(error @ StoreError::Full) => {
                if !std::mem::replace(&mut told_full, true) {
                    tracing::warn!(guest, %error, "cannot store a guest's firmware");
                }
            }
            Err(error) => tracing::warn!(guest, %error, "cannot store a guest's firmware"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_arrive_and_one_guest_brings_no_more_than_its_part() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::within(folder.path());
        let (sender, receiver) = sync_channel(64);
        for number in 1..=20 {
            sender.send((1, Image::new(Falcon::Fecs, &[number], &[]).unwrap())).unwrap();
        }
        sender.send((2, Image::stand_in(Falcon::Copy0))).unwrap();
        drop(sender);
        record(&store, &receiver);
        let entries = store.list().unwrap();
        assert_eq!(entries.len(), NEW_MAX as usize + 1);
        assert!(entries.iter().any(|entry| entry.falcon == Falcon::Copy0));
    }
}
