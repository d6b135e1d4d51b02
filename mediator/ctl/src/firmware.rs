//! Firmware for cards' falcons. These commands work without the daemon: a card cannot be shared without its firmware,
//! and the daemon reads the folder when it takes over a card.

use std::path::PathBuf;

use ::firmware::{Entry, Image, ImageError, Store, StoreError};
use admin_client::AskError;
use api::ErrorCode;
use clap::{Args, Subcommand};
use nvspec::falcon::Falcon;
use serde::Serialize;

use super::Form;
use super::client::ClientError;
use super::output;

#[derive(Clone, Debug, Subcommand)]
pub(super) enum FirmwareCommand {
    /// Lists the images from guests and imports, and whether they are approved
    List {
        #[command(flatten)]
        place: Place,
    },
    /// Adds images from files as candidates for approval
    Import {
        /// Image files, such as those in another host's state folder
        #[arg(required_unless_present = "stand_in")]
        files: Vec<PathBuf>,
        /// Adds placeholder images for software cards behind VFIO, which do not execute firmware; real cards do not
        /// start with them
        #[arg(long)]
        stand_in: bool,
        #[command(flatten)]
        place: Place,
    },
    /// Approves an image for a falcon, effective when the daemon next takes over a card
    Approve {
        /// Digest of the image, or a unique prefix
        #[arg(value_name = "DIGEST", required = true)]
        digests: Vec<String>,
        #[command(flatten)]
        place: Place,
    },
    /// Removes an image
    Remove {
        /// Digest of the image, or a unique prefix
        #[arg(value_name = "DIGEST")]
        digest: String,
        #[command(flatten)]
        place: Place,
    },
}

#[derive(Clone, Debug, Args)]
pub(super) struct Place {
    /// Value of the daemon's `state_dir`
    #[arg(long, value_name = "PATH", default_value = "/var/lib/gpu-mediator")]
    state_dir: PathBuf,
}

/// All images, in the format of `--json`.
#[derive(Clone, Debug, Serialize)]
struct Images {
    images: Vec<Row>,
}

/// A firmware image.
#[derive(Clone, Debug, Serialize)]
struct Row {
    digest: String,
    falcon: &'static str,
    code_bytes: usize,
    data_bytes: usize,
    approved: bool,
}

impl From<Entry> for Row {
    fn from(entry: Entry) -> Self {
        let Entry { digest, falcon, code_words, data_words, approved } = entry;
        let (code_bytes, data_bytes) = (4 * code_words, 4 * data_words);
        Self { digest: digest.to_string(), falcon: falcon.name(), code_bytes, data_bytes, approved }
    }
}

impl FirmwareCommand {
    /// Runs the command and returns its output.
    pub(super) fn run(self, form: Form) -> Result<String, ClientError> {
        let (place, change) = match self {
            Self::List { place } => (place, None),
            Self::Import { files, stand_in, place } => {
                let store = place.store();
                files.iter().try_for_each(|file| store.import(file).map(drop)).map_err(refused)?;
                let own = Falcon::ALL.into_iter().filter(|_| stand_in).map(Image::stand_in);
                own.into_iter().try_for_each(|image| store.add(&image).map(drop)).map_err(refused)?;
                (place, None)
            }
            Self::Approve { digests, place } => {
                let store = place.store();
                digests.iter().try_for_each(|digest| store.approve(digest).map(drop)).map_err(refused)?;
                (place, None)
            }
            Self::Remove { digest, place } => {
                let removed = place.store().remove(&digest).map_err(refused)?;
                (place, Some(removed))
            }
        };
        if let Some(removed) = change {
            let row = Row::from(removed);
            return Ok(form.render(&row, |row| format!("removed {} of {}\n", row.digest, row.falcon)));
        }
        let images = place.store().list().map_err(refused)?.into_iter().map(Row::from).collect();
        Ok(form.render(&Images { images }, |images| table(&images.images)))
    }
}

impl Place {
    fn store(&self) -> Store {
        Store::within(&self.state_dir)
    }
}

fn refused(error: StoreError) -> ClientError {
    let (code, what_to_do) = match &error {
        StoreError::File { .. } => (ErrorCode::Failed, "check the path, and run this as the daemon's user"),
        StoreError::Image { error: ImageError::Form, .. } => {
            (ErrorCode::Invalid, "import a file written by this command or by the daemon")
        }
        StoreError::Image { .. } => (ErrorCode::Invalid, "the file is corrupt: get a new copy"),
        StoreError::Changed { .. } => (ErrorCode::Conflict, "remove the image and import it again"),
        StoreError::Which { .. } => (ErrorCode::NotFound, "see `mediatorctl card firmware list`"),
        StoreError::Full => {
            (ErrorCode::Conflict, "remove images that are no longer needed, see `mediatorctl card firmware list`")
        }
    };
    AskError::Refused(api::Error { code, error: error.to_string(), what_to_do: what_to_do.to_owned() }).into()
}

fn table(images: &[Row]) -> String {
    if images.is_empty() {
        return "no firmware\n".to_owned();
    }
    let mut rows = vec![output::heads(&["FALCON", "CODE", "DATA", "STATE", "DIGEST"])];
    rows.extend(images.iter().map(|row| {
        let state = if row.approved { "approved" } else { "candidate" };
        [row.falcon, &row.code_bytes.to_string(), &row.data_bytes.to_string(), state, &row.digest]
            .map(str::to_owned)
            .to_vec()
    }));
    output::table(rows, &[1, 2])
}
