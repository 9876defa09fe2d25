//! The forms of traces, and how to tell them apart.
//!
//! Detection looks at the first bytes after decompression. Binary forms are recognised by
//! structure that cannot be chance (a magic number, or two records in a row whose version and
//! opcode fields are right), text forms by the shape of their first line.

use crate::binary;
use crate::error::TraceError;
use crate::frame;
use crate::text;

/// A form of trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Hearth's own (`docs/trace-format.md`).
    Hearth,
    /// `time_us,op,offset_bytes,length_bytes` with that header.
    Csv,
    /// `block,count` with that header: block numbers without operation or time.
    Keys,
    /// MSR Cambridge: `Timestamp,Hostname,DiskNumber,Type,Offset,Size,ResponseTime`.
    Msr,
    /// Alibaba: `device_id,opcode,offset,length,timestamp`.
    Alibaba,
    /// Storage Performance Council: `ASU,LBA,size,opcode,timestamp`.
    Spc,
    /// SYSTOR '17 (LUNs of a VDI): `Timestamp,Response,IOType,LUN,Offset,Size`.
    Systor,
    /// Tencent: `timestamp,offset,size,0 or 1,volume`, in seconds and sectors.
    Tencent,
    /// FIU: `nanoseconds pid process sector sectors R/W major minor md5`, separated by blanks.
    Fiu,
    /// fio's `write_iolog`, versions 2 and 3.
    Fio,
    /// Text that `blkparse` prints from a blktrace recording. Queue events count, otherwise the first later kind there is.
    Blkparse,
    /// ESXi vscsiStats, version 1 (32-byte records).
    Vscsi1,
    /// ESXi vscsiStats, version 2 (40-byte records).
    Vscsi2,
    /// libCacheSim's oracleGeneral (24-byte records); an object is one block.
    Oracle,
}

impl Format {
    /// All of them, in the order in which they are tried.
    pub const ALL: [Format; 14] = [
        Format::Hearth,
        Format::Csv,
        Format::Keys,
        Format::Vscsi2,
        Format::Vscsi1,
        Format::Msr,
        Format::Alibaba,
        Format::Spc,
        Format::Systor,
        Format::Tencent,
        Format::Fiu,
        Format::Fio,
        Format::Blkparse,
        Format::Oracle,
    ];

    /// Its name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Format::Hearth => "hearth",
            Format::Csv => "csv",
            Format::Keys => "keys",
            Format::Msr => "msr",
            Format::Alibaba => "alibaba",
            Format::Spc => "spc",
            Format::Systor => "systor17",
            Format::Tencent => "tencent",
            Format::Fiu => "fiu",
            Format::Fio => "fio-iolog",
            Format::Blkparse => "blkparse",
            Format::Vscsi1 => "vscsi1",
            Format::Vscsi2 => "vscsi2",
            Format::Oracle => "oracle-general",
        }
    }

    /// All names, for messages.
    pub fn names() -> String {
        let names: Vec<&str> = Format::ALL.iter().map(|f| f.name()).collect();
        names.join(", ")
    }

    /// Does it tell reads from writes?
    pub fn has_operations(self) -> bool {
        !matches!(self, Format::Keys | Format::Oracle)
    }

    /// Can traces be written in it?
    pub fn is_written(self) -> bool {
        !matches!(
            self,
            Format::Keys | Format::Systor | Format::Tencent | Format::Fiu | Format::Fio
        )
    }

    /// The form of a trace that begins with `head`; `whole` when there is nothing after it.
    pub fn detect(head: &[u8], whole: bool) -> Option<Format> {
        if frame::is_hearth(head) {
            return Some(Format::Hearth);
        }
        for format in [Format::Vscsi2, Format::Vscsi1] {
            if binary::looks_like_vscsi(head, format == Format::Vscsi2, whole) {
                return Some(format);
            }
        }
        if let Some(format) = text::detect(head, whole) {
            return Some(format);
        }
        binary::looks_like_oracle(head, whole).then_some(Format::Oracle)
    }
}

impl std::str::FromStr for Format {
    type Err = TraceError;

    fn from_str(name: &str) -> Result<Format, TraceError> {
        Format::ALL
            .into_iter()
            .find(|f| f.name() == name)
            .ok_or_else(|| TraceError::NoSuchFormat(name.to_owned()))
    }
}

impl std::fmt::Display for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
