//! Option haggling: what client and server agree on before the first request.
//!
//! Pure: takes one option at a time, returns the bytes to answer and what happens next. It
//! runs before a client has proved anything, so every length is checked and every list bounded.

use crate::carried::Haggled;
use crate::export::{Attached, resolve};
use crate::exporter::PROTOCOL;
use crate::wire::{
    FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, OPTION_REPLY_MAGIC, Reader, STRING_MAX, Style, info, opt,
    rep, tflag,
};
use hearth_reactor::Caller;
use hearth_volume::{Catalog, Visit, Volume};
use std::sync::Arc;

/// Longest option data looked at, bytes; longer options are skipped and refused.
pub const OPTION_MAX: usize = 64 << 10;

/// Longest option data skipped, bytes; a client that announces more is cut off.
pub const OPTION_SKIP_MAX: u64 = 1 << 20;

/// Options one client may send; real clients need fewer than ten.
pub const OPTIONS_MAX: u32 = 1024;

/// Bytes of one reply to `LIST`; the rest is cut, with an error that says so.
pub const LIST_MAX: usize = 1 << 20;

/// The id of `base:allocation`, the only metadata context.
pub(crate) const CONTEXT_ID: u32 = 1;

const CONTEXT: &str = "base:allocation";

/// What happens with `STARTTLS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum TlsMode {
    /// TLS is not on offer.
    #[default]
    Off,
    /// The client decides.
    Allowed,
    /// Nothing is said before TLS is up (FORCEDTLS of the protocol document).
    Required,
}

/// What follows an option.
pub(crate) enum Next {
    /// The next option.
    Option,
    /// TLS, once the reply is out.
    StartTls,
    /// The transmission phase.
    Enter(Agreement),
    /// The end, once the reply is out.
    Close,
    /// The end, at once, for this reason.
    Drop(&'static str),
}

/// What was agreed on.
pub(crate) struct Agreement {
    pub export: Attached,
    pub style: Style,
    /// `base:allocation` may be queried.
    pub status: bool,
}

/// State of the haggling.
pub(crate) struct Negotiation {
    tls: TlsMode,
    tls_up: bool,
    fixed: bool,
    no_zeroes: bool,
    style: Style,
    /// Name of the export whose metadata context was set.
    context_of: Option<String>,
    options: u32,
}

impl Negotiation {
    pub(crate) fn new(tls: TlsMode) -> Negotiation {
        Negotiation {
            tls,
            tls_up: false,
            fixed: false,
            no_zeroes: false,
            style: Style::Simple,
            context_of: None,
            options: 0,
        }
    }

    /// What was agreed on so far, for another process; `None` where TLS is on offer, which it cannot go on with.
    pub(crate) fn carry(&self) -> Option<Haggled> {
        (self.tls == TlsMode::Off).then(|| Haggled {
            fixed: self.fixed,
            no_zeroes: self.no_zeroes,
            style: self.style,
            options: self.options,
            context_of: self.context_of.clone(),
        })
    }

    /// The other way round.
    pub(crate) fn resume(haggled: Haggled) -> Negotiation {
        Negotiation {
            fixed: haggled.fixed,
            no_zeroes: haggled.no_zeroes,
            style: haggled.style,
            context_of: haggled.context_of,
            options: haggled.options,
            ..Negotiation::new(TlsMode::Off)
        }
    }

    /// The client's answer to the greeting; false if it set a flag nobody offered.
    pub(crate) fn client_flags(&mut self, flags: u32) -> bool {
        self.fixed = flags & FLAG_FIXED_NEWSTYLE != 0;
        self.no_zeroes = flags & FLAG_NO_ZEROES != 0;
        flags & !(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES) == 0
    }

    /// TLS is up: everything agreed on in the clear is forgotten.
    pub(crate) fn tls_started(&mut self) {
        self.tls_up = true;
        self.style = Style::Simple;
        self.context_of = None;
    }

    /// One more option; false once there were too many.
    pub(crate) fn count(&mut self) -> bool {
        self.options += 1;
        self.options <= OPTIONS_MAX
    }

    /// Refuses an option too long to be read.
    pub(crate) fn too_big(&self, option: u32, out: &mut Vec<u8>) -> Next {
        if option == opt::EXPORT_NAME || !self.fixed {
            return Next::Drop("an option is too long");
        }
        put_error(
            out,
            option,
            rep::ERR_TOO_BIG,
            "the option is longer than 64 KiB",
        );
        Next::Option
    }

    /// Handles one option with its data; appends the replies to `out`.
    pub(crate) fn option(
        &mut self,
        option: u32,
        data: &[u8],
        exports: &Catalog,
        caller: &Caller,
        out: &mut Vec<u8>,
    ) -> Next {
        if !self.fixed && option != opt::EXPORT_NAME {
            return Next::Drop("an option of fixed newstyle without its flag");
        }
        if self.tls == TlsMode::Required && !self.tls_up {
            match option {
                opt::STARTTLS | opt::ABORT => {}
                opt::EXPORT_NAME => return Next::Drop("an export was asked for without TLS"),
                _ => {
                    put_error(out, option, rep::ERR_TLS_REQD, "start TLS first");
                    return Next::Option;
                }
            }
        }
        match option {
            opt::EXPORT_NAME => return self.export_name(data, exports, caller, out),
            opt::ABORT => {
                put_reply(out, option, rep::ACK, &[]);
                return Next::Close;
            }
            opt::LIST | opt::STARTTLS | opt::STRUCTURED_REPLY | opt::EXTENDED_HEADERS
                if !data.is_empty() =>
            {
                put_error(out, option, rep::ERR_INVALID, "the option takes no data");
            }
            opt::LIST => list(exports, out),
            opt::STARTTLS if self.tls_up => {
                put_error(out, option, rep::ERR_INVALID, "TLS is up already")
            }
            opt::STARTTLS if self.tls == TlsMode::Off => {
                put_error(
                    out,
                    option,
                    rep::ERR_POLICY,
                    "TLS is not configured on this server",
                );
            }
            opt::STARTTLS => {
                put_reply(out, option, rep::ACK, &[]);
                return Next::StartTls;
            }
            opt::STRUCTURED_REPLY if self.style == Style::Extended => {
                put_error(
                    out,
                    option,
                    rep::ERR_EXT_HEADER_REQD,
                    "extended headers are agreed on already",
                );
            }
            opt::STRUCTURED_REPLY => {
                self.style = Style::Structured;
                put_reply(out, option, rep::ACK, &[]);
            }
            opt::EXTENDED_HEADERS => {
                self.style = Style::Extended;
                put_reply(out, option, rep::ACK, &[]);
            }
            opt::INFO | opt::GO => {
                let caller = (option == opt::GO).then_some(caller);
                if let Some(agreed) = self.info(option, data, exports, caller, out) {
                    return Next::Enter(agreed);
                }
            }
            opt::LIST_META_CONTEXT | opt::SET_META_CONTEXT => {
                self.meta_context(option, data, exports, out)
            }
            _ => put_error(out, option, rep::ERR_UNSUP, "unknown option"),
        }
        Next::Option
    }

    fn agreement(&self, export: Arc<dyn Volume>, visit: Visit) -> Agreement {
        let status = self.context_of.as_deref() == Some(export.name());
        Agreement {
            export: Attached::new(export, visit),
            style: self.style,
            status,
        }
    }

    fn export_name(
        &self,
        data: &[u8],
        exports: &Catalog,
        caller: &Caller,
        out: &mut Vec<u8>,
    ) -> Next {
        if self.style == Style::Extended {
            return Next::Drop("EXPORT_NAME after extended headers were agreed on");
        }
        let Some(name) = name(data) else {
            return Next::Drop("an export name is malformed");
        };
        let Some(export) = resolve(exports, name) else {
            return Next::Drop("no such export");
        };
        // This option has no way to say no but the end; why is in the log.
        let Ok(visit) = export.admit(caller, PROTOCOL) else {
            return Next::Drop("the export takes no more clients");
        };
        out.extend(export.size().to_be_bytes());
        out.extend(transmission_flags(&*export, self.style).to_be_bytes());
        if !self.no_zeroes {
            out.extend([0; 124]);
        }
        Next::Enter(self.agreement(export, visit))
    }

    /// Answers `INFO`, and `GO` of a caller, who is let in.
    fn info(
        &self,
        option: u32,
        data: &[u8],
        exports: &Catalog,
        caller: Option<&Caller>,
        out: &mut Vec<u8>,
    ) -> Option<Agreement> {
        let Some((name, wanted)) = parse_info(data) else {
            put_error(out, option, rep::ERR_INVALID, "malformed option");
            return None;
        };
        let Some(export) = resolve(exports, name) else {
            put_error(out, option, rep::ERR_UNKNOWN, "no such export");
            return None;
        };
        let admit = |caller| export.admit(caller, PROTOCOL);
        let visit = match caller.map(admit).transpose() {
            Ok(visit) => visit,
            Err(why) => {
                put_error(out, option, rep::ERR_POLICY, &why.to_string());
                return None;
            }
        };
        let mut body = Vec::with_capacity(32);
        body.extend(info::EXPORT.to_be_bytes());
        body.extend(export.size().to_be_bytes());
        body.extend(transmission_flags(&*export, self.style).to_be_bytes());
        put_reply(out, option, rep::INFO, &body);
        let wants = |kind: u16| wanted.chunks_exact(2).any(|w| *w == kind.to_be_bytes());
        if wants(info::NAME) {
            put_reply(
                out,
                option,
                rep::INFO,
                &[&info::NAME.to_be_bytes(), cut(export.name())].concat(),
            );
        }
        if wants(info::DESCRIPTION) {
            let text = export.description();
            put_reply(
                out,
                option,
                rep::INFO,
                &[&info::DESCRIPTION.to_be_bytes(), cut(&text)].concat(),
            );
        }
        if wants(info::BLOCK_SIZE) {
            body.clear();
            body.extend(info::BLOCK_SIZE.to_be_bytes());
            let sizes = export.block_sizes();
            for size in [sizes.smallest, sizes.preferred, sizes.largest] {
                body.extend(size.to_be_bytes());
            }
            put_reply(out, option, rep::INFO, &body);
        }
        put_reply(out, option, rep::ACK, &[]);
        visit.map(|visit| self.agreement(export, visit))
    }

    fn meta_context(&mut self, option: u32, data: &[u8], exports: &Catalog, out: &mut Vec<u8>) {
        let set = option == opt::SET_META_CONTEXT;
        if set {
            // The protocol: also a failing SET drops what was set before.
            self.context_of = None;
            if self.style == Style::Simple {
                put_error(
                    out,
                    option,
                    rep::ERR_INVALID,
                    "ask for structured replies first",
                );
                return;
            }
        }
        let Some((name, chosen)) = parse_contexts(data, set) else {
            put_error(out, option, rep::ERR_INVALID, "malformed option");
            return;
        };
        let Some(export) = resolve(exports, name) else {
            put_error(out, option, rep::ERR_UNKNOWN, "no such export");
            return;
        };
        if chosen {
            let id = if set { CONTEXT_ID } else { 0 };
            put_reply(
                out,
                option,
                rep::META_CONTEXT,
                &[&id.to_be_bytes(), CONTEXT.as_bytes()].concat(),
            );
            if set {
                self.context_of = Some(export.name().to_owned());
            }
        }
        put_reply(out, option, rep::ACK, &[]);
    }
}

fn transmission_flags(export: &dyn Volume, style: Style) -> u16 {
    let can = export.capabilities();
    let mut flags = tflag::HAS_FLAGS | tflag::SEND_CACHE;
    for (has, flag) in [
        (!can.write, tflag::READ_ONLY),
        (can.flush, tflag::SEND_FLUSH),
        (can.fua, tflag::SEND_FUA),
        (can.coherent, tflag::CAN_MULTI_CONN),
        (can.discard, tflag::SEND_TRIM),
        (can.write_zeroes, tflag::SEND_WRITE_ZEROES),
        // It says that the server knows the command's flag, not that zeroing is fast.
        (can.write_zeroes, tflag::SEND_FAST_ZERO),
    ] {
        if has {
            flags |= flag;
        }
    }
    if style != Style::Simple {
        flags |= tflag::SEND_DF;
    }
    flags
}

/// An export name that is all of `data`.
fn name(data: &[u8]) -> Option<&str> {
    if data.len() > STRING_MAX {
        return None;
    }
    std::str::from_utf8(data).ok()
}

/// Bytes of a string, cut to what the protocol allows.
fn cut(text: &str) -> &[u8] {
    text.as_bytes().get(..STRING_MAX).unwrap_or(text.as_bytes())
}

/// Name and list of wanted information (16 bits each) of `INFO` and `GO`.
fn parse_info(data: &[u8]) -> Option<(&str, &[u8])> {
    let mut r = Reader(data);
    let name = r.string()?;
    let count = r.u16()?;
    let wanted = r.take(usize::from(count) * 2)?;
    r.0.is_empty().then_some((name, wanted))
}

/// Export name, and whether the queries choose `base:allocation`.
fn parse_contexts(data: &[u8], set: bool) -> Option<(&str, bool)> {
    let mut r = Reader(data);
    let name = r.string()?;
    let count = r.u32()?;
    let mut chosen = !set && count == 0;
    // Each query takes at least four bytes of `data`, so its length bounds this loop.
    for _ in 0..count {
        let query = r.string()?;
        chosen |= query == CONTEXT || (!set && query == "base:");
    }
    r.0.is_empty().then_some((name, chosen))
}

fn list(exports: &Catalog, out: &mut Vec<u8>) {
    for export in exports.list() {
        let text = export.description();
        let (name, text) = (cut(export.name()), cut(&text));
        if out.len() + name.len() + text.len() > LIST_MAX {
            put_error(
                out,
                opt::LIST,
                rep::ERR_TOO_BIG,
                "more exports than fit here; ask for yours by name",
            );
            return;
        }
        put_reply(
            out,
            opt::LIST,
            rep::SERVER,
            &[&(name.len() as u32).to_be_bytes(), name, text].concat(),
        );
    }
    put_reply(out, opt::LIST, rep::ACK, &[]);
}

fn put_reply(out: &mut Vec<u8>, option: u32, kind: u32, body: &[u8]) {
    out.extend(OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend(option.to_be_bytes());
    out.extend(kind.to_be_bytes());
    out.extend((body.len() as u32).to_be_bytes());
    out.extend(body);
}

/// Appends an error reply with a text for people.
pub(crate) fn put_error(out: &mut Vec<u8>, option: u32, kind: u32, text: &str) {
    put_reply(out, option, kind, text.as_bytes());
}
