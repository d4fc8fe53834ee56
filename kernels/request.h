// What kernels read about a request of a decode step, on the GPU and on the CPU. core/batch.py packs it.
#pragma once

namespace kvseek {

struct Request {
    int token;             // last token, the decoder's input; LATEST, -1: the one that the slot's last step has drawn
    int slot;              // row of the window, the extent table and the index's per-slot arrays
    int position;          // of `token` in the sequence
    int write_row;         // window row that receives its key and value
    int sink_rows;         // window rows 0 .. sink_rows - 1 are valid
    int ring_first;        // first valid ring row, counted from the ring's start
    int ring_rows;         // valid ring rows from there; they wrap. Counts the row of `token`
    int length;            // tokens in the retrieval region
    int dense;             // attend to the whole retrieval region: no selection was made
    int method_fields[4];  // the method's own (Budget.method_fields)
    int companions;        // requests of the batch right before this one that a scan may take together with it, 0 to 3
    int common;            // first tokens of the region that are in the same extents for all of these: a multiple of
                           // 1,024, or the whole region; 0: alone
    int scratch;           // the request's first extent in arrays of a selection's intermediate results
                           // (IndexContext.scratch_extents)
};
static_assert(sizeof(Request) == 64, "core/batch.py packs 16 integers a request");

}  // namespace kvseek
