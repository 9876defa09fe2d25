//! What is known of the disks' workloads, for the control plane.

use std::path::Path;

use hearth_observe::{RecordError, RecordOptions};

use super::Daemon;
use crate::api::workload::{HistogramReport, RecordStart, Recording};
use crate::error::{Error, Kind, Result};

/// Size of a recording whose owner does not say: some 150 million requests.
const RECORDING_BYTES: u64 = 1 << 30;

fn failed(name: &str, error: &RecordError) -> Error {
    let kind = match error {
        RecordError::NoDisk | RecordError::Busy | RecordError::Idle => Kind::Conflict,
        RecordError::TooSmall | RecordError::Create { .. } => Kind::Invalid,
        RecordError::Write(_) | RecordError::Slow { .. } => Kind::Unavailable,
    };
    Error::of(kind, error.fault().within(format!("disk {name}")))
}

impl Daemon {
    fn id_of(&self, name: &str) -> Result<u16> {
        self.with_slot(name, |slot| Ok(slot.id))
    }

    pub(super) fn histogram_report(&self, name: &str, reset: bool) -> Result<HistogramReport> {
        let id = self.id_of(name)?;
        let counted = self.observer.histograms(id, reset);
        Ok(HistogramReport::new(name, id, counted.as_ref()))
    }

    pub(super) fn begin_recording(&self, name: &str, start: &RecordStart) -> Result<Recording> {
        let id = self.id_of(name)?;
        let path = Path::new(&start.file);
        if !path.is_absolute() {
            return Err(Error::invalid(
                format!("the recording's file {} is no absolute path", start.file),
                "name it from the root: the daemon's working directory is not yours",
            ));
        }
        let duration_ns = match start.seconds {
            // Some 300 years: nobody means that.
            Some(s) if !(s > 0.0 && s < 1e10) => {
                return Err(Error::invalid(
                    format!("a recording cannot take {s} seconds"),
                    "give a positive number",
                ));
            }
            seconds => seconds.map(|s| (s * 1e9) as u64),
        };
        let options = RecordOptions {
            path: path.to_owned(),
            duration_ns,
            bytes_max: start.max_bytes.unwrap_or(RECORDING_BYTES),
        };
        let status = self.observer.record(id, options);
        status.map(Into::into).map_err(|e| failed(name, &e))
    }

    pub(super) fn end_recording(&self, name: &str) -> Result<Recording> {
        let id = self.id_of(name)?;
        let status = self.observer.stop_recording(id);
        status.map(Into::into).map_err(|e| failed(name, &e))
    }
}
